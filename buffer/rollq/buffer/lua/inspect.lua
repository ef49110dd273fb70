-- All that is known of one group, without its payload.
-- KEYS[1] clock   ARGV incarnation, group id
-- Returns the group's hash, flat (empty: no such group).   Caller: monitor.   Read only.
local function inspect(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  return redis.call('HGETALL', group_key(clock.prefix, args[2]))
end
