-- Fixes the next part of a step's batch that is trained while the batch fills: every rank trains the same parts, and so
-- does a trainer that takes over.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, epoch, nonce, step, claim_round, number, groups
--   claim_round: of the plan that the caller saw   number: of the part, from 0   groups: per task, up to its end (JSON)
-- Returns: 1 when the part is fixed, by this call or by an earlier one; 0 when the round is over, or an earlier part is
--   missing: look at the plan again
-- Caller: Claiming.divide; the trainer, any rank
-- Repeat: the first one counts
--
-- The batch counts as delivered from then on: no rank undoes its claims.
local function divide(keys, args)
  local incarnation, epoch, nonce, step, claim_round, number, groups = unpack(args)
  check_whole(step, claim_round)
  check_counts(number)
  check_given(groups)
  local prefix, err = read_run_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  local key, refused, live_round = read_plan(prefix, epoch, step)
  if not key then return refused end
  local parts = plan_parts(key)
  if live_round ~= tonumber(claim_round) or #parts < tonumber(number) then return 0 end
  if #parts == tonumber(number) then
    parts[#parts + 1] = groups
    redis.call('HSET', key, 'parts', table.concat(parts, '\n'), 'delivered', 1)
  end
  return 1
end
