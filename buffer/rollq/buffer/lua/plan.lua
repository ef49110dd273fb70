-- Fixes a step's sizes per task before any task is claimed, and decides between ranks that deliver its batch and ranks
-- that undo a torn one.
-- KEYS[1] run hash   ARGV incarnation, epoch, nonce, step, sizes (JSON), look|deliver|undo, round that the caller looked at
-- Returns the sizes that count (those of the first caller), delivered 0|1, the round.   Caller: trainer, any rank.
-- A repeat returns what stands.
--
-- Undoing begins a new round, unless the batch was delivered; delivering needs the round in which the tasks were
-- claimed. So one of the two wins, and the other finds out.
local function plan(keys, args)
  local prefix, err = read_run_as_trainer(keys[1], args[1], args[2], args[3])
  if err then return err end
  local key = prefix .. 'plan:' .. args[4]
  redis.call('HSETNX', key, 'sizes', args[5])
  local found = redis.call('HMGET', key, 'sizes', 'delivered', 'round')
  local delivered, round = tonumber(found[2] or '0'), tonumber(found[3] or '0')
  if delivered == 0 and round == tonumber(args[7]) then
    if args[6] == 'deliver' then
      delivered = 1
      redis.call('HSET', key, 'delivered', 1)
    elseif args[6] == 'undo' then
      round = redis.call('HINCRBY', key, 'round', 1)
    end
  end
  return { found[1], delivered, round }
end
