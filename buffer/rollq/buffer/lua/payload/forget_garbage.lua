-- Removes the names of payloads that are gone from the garbage.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, then names of payloads
-- Returns: how many there were
-- Caller: Collecting.collect; any role
-- Repeat: finds none of them
local function forget_garbage(keys, args)
  local incarnation = unpack(args, 1, 1)
  check_rows(args, 2, 1)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  return redis.call('SREM', clock.prefix .. 'garbage', unpack(args, 2))
end
