-- Returns external payloads that no group names any longer.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, limit
-- Returns: the names of some of them; none while the buffer is being saved, since the saver may read them
-- Caller: Collecting.collect; any role
-- Repeat: finds what is left
--
-- It writes nothing, but is called as a function that writes: the facts behind its reply are then on a replica before a
-- payload is removed.
local function find_garbage(keys, args)
  local incarnation, limit = unpack(args)
  check_counts(limit)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  if is_saving(clock, now_ms()) then return {} end
  return redis.call('SRANDMEMBER', clock.prefix .. 'garbage', limit)
end
