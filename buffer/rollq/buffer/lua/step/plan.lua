-- Fixes a step's sizes per task before any task is claimed, and decides between ranks that deliver the step's batch and
-- ranks that undo a torn claim.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, epoch, nonce, step, sizes, action, claim_round
--   sizes: JSON   action: look|deliver|undo   claim_round: the round of claiming that the caller saw
-- Returns: the sizes of the round's first caller ('' before one), delivered 0|1, the round now, how often the step's
--   batch was released, and the parts that it was divided into (see `divide`)
-- Caller: Claiming._plan_call; the trainer, any rank
-- Repeat: returns what was decided
--
-- An undo begins a new round, unless the batch was delivered; a delivery needs the round in which the tasks were
-- claimed. So exactly one of the two succeeds, and the other caller learns of it.
local function plan(keys, args)
  local incarnation, epoch, nonce, step, sizes, action, claim_round = unpack(args)
  check_whole(step, claim_round)
  check_choice(action, 'look', 'deliver', 'undo')
  check_given(sizes)
  local prefix, err = read_run_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  local key, delivered, live_round, releases = read_plan(prefix, epoch, step)
  if not key then return delivered end
  local is_live = live_round == tonumber(claim_round)
  if is_live then redis.call('HSETNX', key, 'sizes', sizes) end
  if is_live and delivered == 0 then
    if action == 'deliver' then
      delivered = 1
      redis.call('HSET', key, 'delivered', delivered)
    elseif action == 'undo' then
      live_round = redis.call('HINCRBY', key, 'round', 1)
    end
  end
  return { redis.call('HGET', key, 'sizes') or '', delivered, live_round, releases, plan_parts(key) }
end
