-- Carries a new epoch into a task: fences the old trainer, and sets clock and counters back to the checkpoint's step.
-- Moves: claimed -> archived, for the steps that the checkpoint covers
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, from_step
-- Returns: more 0|1 (1: call again), and the last and the first step that may have a manifest: call rewind for the
--   last, and down to the first or from_step + 1
-- Caller: BufferCore._carry_epoch; the trainer, rank 0, and roles that register a task during the epoch
-- Repeat: changes nothing

-- The trainer's checkpoint wins: the steps that it covers are trained, committed or not. Files the batch of the first
-- step that is not committed; returns whether there was such a batch.
local function commit_one(clock, from_step)
  for step = clock.committed + 1, math.min(from_step, clock.claimed_step) do
    local manifest = manifest_key(clock, step)
    if has_batch(manifest) then
      file_trained(clock, manifest, step, true)
      write_clock(clock, { committed = step, step = math.max(clock.step, step + 1) })
      return true
    end
  end
  return false
end

local function restore_counters(clock, from_step)
  if from_step >= clock.committed then return end
  -- without a manifest, the step came before the task
  local consumed = redis.call('HGET', manifest_key(clock, from_step), 'consumed') or 0
  redis.call('HSET', clock.prefix .. 'progress', 'consumed', consumed)
end

-- The last and the first step that may have a manifest. A task has no manifest if its store never saw the steps before
-- `from_step`, or if it joined after them. The new epoch writes manifests after `from_step`.
local function manifest_steps(clock, from_step)
  local first = clock.first_manifest
  local has_none = clock.claimed_step <= first and redis.call('EXISTS', manifest_key(clock, first)) == 0
  if has_none then return from_step, from_step end
  return math.max(clock.claimed_step, from_step), math.min(first, from_step)
end

local function checkpoint_at(clock, from_step)
  -- a store that never saw these steps holds nothing of them for a checkpoint
  if from_step > clock.claimed_step and redis.call('EXISTS', clock.prefix .. 'archived') == 0 then return from_step end
  return math.min(math.max(clock.checkpoint, clock.history), from_step)
end

local function refuse_resume(clock, from_step)
  if from_step < clock.history then
    return fail(
      'HISTORY_GONE',
      'step %s is older than what is kept; the oldest step to resume from is %s',
      from_step,
      clock.history
    )
  end
  if from_step > clock.claimed_step and from_step <= clock.undone then
    return fail(
      'HISTORY_GONE',
      'step %s was undone by a rewind, and its groups may be trained again; the newest step to resume from is %s',
      from_step,
      clock.claimed_step
    )
  end
  for step = clock.committed + 1, math.min(from_step, clock.claimed_step) do
    if open_target(manifest_key(clock, step)) then
      return fail(
        'HISTORY_GONE',
        'the batch of step %s is not whole: the server lost its last moments; resume from step %s or before',
        step,
        step - 1
      )
    end
  end
  return nil
end

local function task_begin_epoch(keys, args)
  local incarnation, epoch, nonce, from_step = unpack(args)
  check_given(nonce)
  check_whole(epoch, from_step)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  epoch, from_step = tonumber(epoch), tonumber(from_step)
  if clock.epoch > epoch then return epoch_replaced(epoch, clock.epoch) end
  if clock.epoch == epoch then return { 0, clock.claimed_step, clock.first_manifest } end
  err = refuse_resume(clock, from_step)
  if err then return err end
  if commit_one(clock, from_step) then return { 1, 0, 0 } end
  restore_counters(clock, from_step)
  local claimed_step, first = manifest_steps(clock, from_step)
  -- floors that are too old for every step that can still be trained are settled
  local floors = lower_levels(clock.floors, epoch, from_step, stale_version(clock, clock.history + 1))
  write_clock(clock, {
    epoch = epoch,
    nonce = nonce,
    step = from_step + 1,
    version = from_step,
    committed = from_step,
    claimed_step = claimed_step,
    checkpoint = checkpoint_at(clock, from_step),
    floors = floors,
    first_manifest = first,
    sleep = false, -- the trainer for which engines made room is gone
  })
  wake(clock, EVENT.publish)
  return { 0, claimed_step, first }
end
