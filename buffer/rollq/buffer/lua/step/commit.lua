-- The batch of a step has been trained. A task that takes no part in the batch only moves to the next step.
-- Moves: claimed -> archived, or dropped where the run resumes fresh
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, step, takes_part, keeps_copies, trained
--   keeps_copies: 0 where memory is full: groups that may be trained again are not kept for it, and are counted
--   trained: the ids of the groups that were trained, in the order of the batch; '' when unknown
-- Returns: 1 when it was committed, 0 when it was already
-- Caller: Training.commit; the trainer, rank 0
-- Repeat: changes nothing
local LOST = 'the store has lost its last moments: the server restarted from an older append-only file, or a replica '
  .. 'took over. Resume from the last checkpoint'

local function refuse_unclaimed(clock, step)
  local found = 'step %s cannot be committed: the last committed step is %s, the last claimed one %s'
  local known = string.format(found, step, clock.committed, clock.claimed_step)
  if step > clock.claimed_step then known = known .. '. If this trainer has claimed it, ' .. LOST end
  return fail('NOT_CLAIMED', '%s', known)
end

local function commit(keys, args)
  local incarnation, epoch, nonce, step, takes_part, keeps_copies, trained = unpack(args)
  check_whole(step)
  check_choice(takes_part, '0', '1')
  check_choice(keeps_copies, '0', '1')
  local clock, err = read_clock_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  step = tonumber(step)
  if step <= clock.committed then return 0 end
  local manifest = manifest_key(clock, step)
  if takes_part == '1' and (step ~= clock.committed + 1 or not has_batch(manifest)) then
    return refuse_unclaimed(clock, step)
  end
  if takes_part == '1' and trained ~= '' and trained ~= redis.call('HGET', manifest, 'ids') then
    return fail('NOT_CLAIMED', 'step %s cannot be committed: its batch was replaced; %s', step, LOST)
  end
  if takes_part == '1' and open_target(manifest) then
    return fail('NOT_CLAIMED', 'step %s cannot be committed: its batch still fills; take it to its end first', step)
  end
  file_trained(clock, manifest, step, keeps_copies == '1')
  write_clock(clock, {
    committed = step,
    claimed_step = math.max(clock.claimed_step, step),
    step = math.max(clock.step, step + 1),
  })
  wake(clock, EVENT.commit)
  return 1
end
