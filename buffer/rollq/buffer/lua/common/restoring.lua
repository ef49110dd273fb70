-- Restoring a snapshot into a task that does not exist yet.

-- Returns whether a task is yet to be restored as `incarnation`, or nil and an error reply when it belongs to another.
local function may_restore(clock_key, incarnation)
  local existing, restoring = fields(clock_key, 'incarnation', 'restoring')
  if existing == incarnation then return false end
  if existing or (restoring and restoring ~= incarnation) then
    return nil, fail('RUN_MISMATCH', 'the task exists here already, in another incarnation of the run')
  end
  return true
end

-- Writes the parts of a snapshot from `args`, starting at index `at`. A part is the end of its key, HSET or ZADD, the
-- number of arguments, and the arguments; or the end of its key, RPUSH, the number of arguments, the length that the
-- list must have before, and the arguments, so that a repeated call adds nothing. Stops at an empty key or at the end
-- of `args`, and returns that index.
local function write_parts(prefix, args, at)
  while args[at] and args[at] ~= '' do
    local name, command, count = unpack(args, at, at + 2)
    local key, first, last = prefix .. name, at + 3, at + 2 + tonumber(count)
    if command ~= 'RPUSH' then
      redis.call(command, key, unpack(args, first, last))
    elseif redis.call('LLEN', key) == tonumber(args[first]) then
      redis.call('RPUSH', key, unpack(args, first + 1, last))
    end
    at = last + 1
  end
  return at
end
