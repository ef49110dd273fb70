-- The last of a task's restoring: counters, manifests, batches, and the clock, with which the task exists.
-- KEYS[1] clock   ARGV incarnation to be, then parts: key's last part, HSET|RPUSH, how many arguments, the arguments
-- Returns 1 restored, 0 it was already.   Caller: Buffer.restore, when all groups are there.   A repeat changes nothing.
local function write_parts(prefix, args, at)
  while args[at] and args[at] ~= '' do
    local last = at + 2 + tonumber(args[at + 2])
    redis.call(args[at + 1] == 'RPUSH' and 'RPUSH' or 'HSET', prefix .. args[at], unpack(args, at + 3, last))
    at = last + 1
  end
  return at
end

local function restore_task(keys, args)
  local found = redis.call('HMGET', keys[1], 'incarnation', 'restoring')
  if found[1] == args[1] then return 0 end
  if found[1] or (found[2] and found[2] ~= args[1]) then
    return fail('RUN_MISMATCH', 'the task exists here already, in another incarnation of the run')
  end
  write_parts(string.sub(keys[1], 1, -6), args, 2)
  redis.call('HDEL', keys[1], 'restoring')
  return 1
end
