-- Gives up a claimed batch, and every round of its step up to the one in which it was claimed.
-- Moves: claimed -> completed|failed, or dropped
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, step, mode, up_to_round, then bad_ids
--   mode: return|drop|quarantine   up_to_round: of the batch; one that was claimed in a later round stays
--   bad_ids: groups that are quarantined in any mode
-- Returns: how many groups it held
-- Caller: Claiming._release; the trainer, rank 0, and any rank that undoes a torn claim
-- Repeat: finds no batch, or one of a later round, and returns 0
local FIRST_BAD = 7

local function release_group(clock, id, step, mode)
  redis.call('ZREM', clock.prefix .. 'claimed', id)
  if redis.call('EXISTS', group_key(clock.prefix, id)) == 0 then return end -- deleted by hand
  if mode == 'quarantine' then
    file_for_audit(clock, id, 'failed', 'quarantined by the trainer at step ' .. step)
  elseif mode == 'return' then
    return_to_completed(clock, id)
  else
    drop_group(clock, id, 'released')
  end
end

local function release(keys, args)
  local incarnation, epoch, nonce, step, mode, up_to_round = unpack(args, 1, FIRST_BAD - 1)
  check_whole(step, up_to_round)
  check_choice(mode, 'return', 'drop', 'quarantine')
  local clock, err = read_clock_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  step, up_to_round = tonumber(step), tonumber(up_to_round)
  if step <= clock.committed then return fail('COMMITTED', 'step %s is committed and cannot be released', step) end
  local manifest = manifest_key(clock, step)
  local claimed_round, _, given_up = claim_numbers(clock, manifest)
  if claimed_round > up_to_round then return 0 end
  local had_batch = has_batch(manifest)
  local bad = {}
  for i = FIRST_BAD, #args do
    bad[args[i]] = true
  end
  local ids = manifest_ids(manifest)
  for _, id in ipairs(ids) do
    release_group(clock, id, step, bad[id] and 'quarantine' or mode)
  end
  -- an older trainer may have trained it: no trainer may resume from its checkpoint
  local is_replayed = tonumber(redis.call('HGET', manifest, 'epoch') or clock.epoch) < clock.epoch
  if is_replayed then write_clock(clock, { undone = math.max(clock.undone, step) }) end
  redis.call('UNLINK', manifest)
  -- a claim of these rounds that arrives late takes nothing
  redis.call('HSET', manifest, 'numbered_in', clock.epoch, 'given_up', math.max(given_up, up_to_round))
  -- a replay may already hold the batches of later steps
  if had_batch and step == clock.claimed_step then write_clock(clock, { claimed_step = step - 1 }) end
  wake(clock, EVENT.release)
  return #ids
end
