-- One group with its payload, at one instant.
-- KEYS[1] clock   ARGV incarnation, group id
-- Returns the group's hash (flat; empty: it has left), and index, frame, ... of its samples.
-- Caller: Buffer.save.   Read only.
local function save_group(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  return { redis.call('HGETALL', group_key(clock.prefix, args[2])), redis.call('HGETALL', rollout_key(clock.prefix, args[2])) }
end
