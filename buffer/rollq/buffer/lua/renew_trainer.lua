-- Moves the deadline until which another trainer is kept out.
-- KEYS[1] run hash   ARGV incarnation, epoch, nonce, lease ms
-- Returns 1.   Caller: trainer, rank 0.   A repeat moves the deadline again.
local function renew_trainer(keys, args)
  local prefix, err = read_run_as_trainer(keys[1], args[1], args[2], args[3])
  if err then return err end
  redis.call('HSET', prefix .. 'trainer', 'deadline_ms', now_ms() + tonumber(args[4]))
  return 1
end
