-- Lets groups that are kept for audit leave for the archive: the run is over.
-- Moves: failed|filtered -> leaving
-- KEYS: clock
-- ARGV: incarnation, limit
-- Returns: how many left
-- Caller: Archiving.leave_audit; archivers
-- Repeat: finds others, or none
local function leave_audit(keys, args)
  local incarnation, limit = unpack(args)
  check_counts(limit)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  if clock.archive ~= 1 or is_saving(clock, now_ms()) then return 0 end
  local left = 0
  for _, status in ipairs({ 'failed', 'filtered' }) do
    for _, id in ipairs(redis.call('ZRANGE', clock.prefix .. status, 0, limit - 1)) do
      withdraw(clock, id, status)
      drop_group(clock, id, status)
      left = left + 1
    end
  end
  return left
end
