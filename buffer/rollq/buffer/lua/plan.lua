-- Fixes a step's sizes per task before any task is claimed, and notes that its batch has been delivered.
-- KEYS[1] run hash   ARGV incarnation, epoch, nonce, step, sizes (JSON), delivered 0|1
-- Returns the sizes that count (those of the first caller), delivered 0|1.   Caller: trainer, any rank.
-- A repeat returns what stands.
local function plan(keys, args)
  local prefix, err = read_run_as_trainer(keys[1], args[1], args[2], args[3])
  if err then return err end
  local key = prefix .. 'plan:' .. args[4]
  redis.call('HSETNX', key, 'sizes', args[5])
  if args[6] == '1' then redis.call('HSET', key, 'delivered', 1) end
  local found = redis.call('HMGET', key, 'sizes', 'delivered')
  return { found[1], found[2] == '1' and 1 or 0 }
end
