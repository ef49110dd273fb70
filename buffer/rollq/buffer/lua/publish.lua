-- Makes a version the live one for a task: what is too old stops counting at once.
-- KEYS[1] clock   ARGV incarnation, epoch, nonce, version
-- Returns the step that is trained next.   Caller: trainer, rank 0.   A repeat changes nothing.
local function publish(keys, args)
  local clock, err = read_clock_as_trainer(keys[1], args[1], args[2], args[3])
  if err then return err end
  local version = tonumber(args[4])
  local step = math.max(clock.step, version + 1)
  redis.call('HSET', keys[1], 'version', math.max(clock.version, version), 'step', step)
  redis.call('PUBLISH', clock.events, 'publish')
  return step
end
