-- Has engines give their memory to the trainer, or lets them go on. What production is set to stays as it is.
-- KEYS[1] clock   ARGV incarnation, epoch, nonce, why (also tells this sleep from others), or '' to wake
-- Returns 1.   Caller: trainer, rank 0.   A repeat changes nothing.
local function sleep(keys, args)
  local _, err = read_clock_as_trainer(keys[1], args[1], args[2], args[3])
  if err then return err end
  if args[4] == '' then redis.call('HDEL', keys[1], 'sleep')
  else redis.call('HSET', keys[1], 'sleep', args[4]) end
  redis.call('PUBLISH', redis.call('HGET', keys[1], 'events'), 'control')
  return 1
end
