-- Carries a new epoch into a task: fences the old trainer, and sets clock and counters back to the checkpoint's step.
-- Moves: claimed -> archived, for the steps that the checkpoint covers
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, from_step
-- Returns: the last step that may have a manifest: call rewind for it, and down to from_step + 1
-- Caller: BufferCore._carry_epoch; the trainer, rank 0, and roles that register a task meanwhile
-- Repeat: changes nothing
-- The trainer's checkpoint wins: the steps that it covers are trained, committed or not.
local function commit_through(clock, from_step)
  if from_step < clock.committed then
    -- without a manifest, the step came before the task
    local consumed = redis.call('HGET', manifest_key(clock, from_step), 'consumed') or 0
    redis.call('HSET', clock.prefix .. 'progress', 'consumed', consumed)
  end
  for step = clock.committed + 1, math.min(from_step, clock.claimed_step) do
    local manifest = manifest_key(clock, step)
    if has_batch(manifest) then file_trained(clock, manifest, step) end
  end
end

local function checkpoint_at(clock, from_step)
  -- a store that never saw these steps holds nothing of them for a checkpoint
  if from_step > clock.claimed_step and redis.call('EXISTS', clock.prefix .. 'archived') == 0 then return from_step end
  return math.min(math.max(clock.checkpoint, clock.history), from_step)
end

local function task_begin_epoch(keys, args)
  local incarnation, epoch, nonce, from_step = unpack(args)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  epoch, from_step = tonumber(epoch), tonumber(from_step)
  if clock.epoch > epoch then return epoch_replaced(epoch, clock.epoch) end
  if clock.epoch == epoch then return clock.claimed_step end
  if from_step < clock.history then
    return fail(
      'HISTORY_GONE',
      'step %s is older than what is kept; the oldest step to resume from is %s',
      from_step,
      clock.history
    )
  end
  commit_through(clock, from_step)
  local claimed_step = math.max(clock.claimed_step, from_step)
  -- stylua: ignore
  redis.call('HSET', clock.key, 'epoch', epoch, 'nonce', nonce, 'step', from_step + 1, 'version', from_step,
    'committed', from_step, 'claimed_step', claimed_step, 'checkpoint', checkpoint_at(clock, from_step),
    'floors', lower_floors(clock, epoch, from_step))
  redis.call('HDEL', clock.key, 'sleep') -- the trainer for which engines made room is gone
  redis.call('PUBLISH', clock.events, EVENT.publish)
  return claimed_step
end
