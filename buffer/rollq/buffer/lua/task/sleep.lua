-- Has engines give their memory to the trainer, or lets them continue. The task's control stays as it is.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, why
--   why: the reason, which also identifies this sleep; '' to wake engines
-- Returns: 1
-- Caller: Training.sleep; the trainer, rank 0
-- Repeat: changes nothing
local function sleep(keys, args)
  local incarnation, epoch, nonce, why = unpack(args)
  local clock, err = read_clock_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  if why == '' then
    redis.call('HDEL', clock.key, 'sleep')
  else
    redis.call('HSET', clock.key, 'sleep', why)
  end
  redis.call('PUBLISH', clock.events, EVENT.control)
  return 1
end
