-- Forgets the sizes of a step: its next claim plans it again, in a new round.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, epoch, nonce, step, claim_round, released
--   claim_round: the round that the caller gives up   released: 1 after its batch was released, 0 before one is claimed
-- Returns: the round now
-- Caller: Claiming._replan; the trainer, rank 0 after a release, any rank before a claim
-- Repeat: finds a later round, and changes nothing
local function replan(keys, args)
  local incarnation, epoch, nonce, step, claim_round, released = unpack(args)
  check_whole(step, claim_round)
  check_choice(released, '0', '1')
  local prefix, err = read_run_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  local key, delivered, live_round = read_plan(prefix, epoch, step)
  if not key then return delivered end
  if live_round ~= tonumber(claim_round) or (delivered == 1 and released == '0') then return live_round end
  redis.call('HDEL', key, 'sizes', 'parts')
  redis.call('HSET', key, 'delivered', 0)
  redis.call('HINCRBY', key, 'releases', released)
  return redis.call('HINCRBY', key, 'round', 1)
end
