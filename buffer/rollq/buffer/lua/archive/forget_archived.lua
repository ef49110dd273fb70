-- A portion of groups is in the archive: they leave the buffer.
-- Moves: leaving -> gone
-- KEYS: clock
-- ARGV: incarnation, number
--   number: of the portion
-- Returns: 1; 0 while the buffer is being saved, which drops nothing: call again
-- Caller: Archiving.forget_archived; archivers
-- Repeat: finds another portion, or none, and changes nothing
local function forget_archived(keys, args)
  local incarnation, number = unpack(args)
  check_counts(number)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local archive, now = clock.prefix .. 'archive', now_ms()
  local live, ids = fields(archive, 'number', 'ids')
  if live ~= number or not ids then return 1 end
  if is_saving(clock, now) then return 0 end
  local count = 0
  for _, id in ipairs(split(ids)) do
    if redis.call('ZREM', clock.prefix .. 'leaving', id) == 1 then
      count = count + 1
      remove_group(clock, id, group_fields(clock, id, 'left') or 'deleted')
    end
  end
  redis.call('HDEL', archive, 'ids', 'step', 'holder', 'until_ms', 'trouble')
  redis.call('HINCRBY', archive, 'groups', count)
  redis.call('HSET', archive, 'written_ms', now)
  return 1
end
