-- Carries a new epoch into a task: fences the old trainer, sets clock and counters to the checkpoint's step.
-- KEYS[1] clock   ARGV incarnation, epoch, nonce, from_step
-- Returns the last step that may have a manifest: rewind is to be called from it down to from_step + 1.
-- Caller: trainer, every rank.   A repeat changes nothing.
local function begin_epoch(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local epoch, from_step = tonumber(args[2]), tonumber(args[4])
  if clock.epoch > epoch then return fail('FENCED', 'epoch ' .. epoch .. ' was replaced by epoch ' .. clock.epoch) end
  if clock.epoch == epoch then return clock.claimed_step end
  if from_step < clock.history then
    return fail('HISTORY_GONE', 'step ' .. from_step .. ' is older than what is kept; the oldest step to resume from is ' .. clock.history)
  end
  local progress = clock.prefix .. 'progress'
  if from_step < clock.committed then
    -- without a manifest, the step came before the task
    redis.call('HSET', progress, 'consumed', redis.call('HGET', clock.prefix .. 'manifest:' .. from_step, 'consumed') or 0)
  end
  -- the trainer's checkpoint wins: what it covers is trained, committed or not
  for step = clock.committed + 1, math.min(from_step, clock.claimed_step) do
    local manifest = clock.prefix .. 'manifest:' .. step
    if redis.call('HEXISTS', manifest, 'ids') == 1 then file_trained(clock, manifest, step) end
  end
  local claimed_step = math.max(clock.claimed_step, from_step)
  local checkpoint = math.min(math.max(clock.checkpoint, clock.history), from_step)
  -- a store that never saw these steps holds nothing of them for a checkpoint
  if from_step > clock.claimed_step and redis.call('EXISTS', clock.prefix .. 'archived') == 0 then checkpoint = from_step end
  for old = 0, clock.epoch do
    local floor = tonumber(redis.call('HGET', keys[1], 'floor:' .. old) or from_step)
    redis.call('HSET', keys[1], 'floor:' .. old, math.min(floor, from_step))
  end
  redis.call('HSET', keys[1], 'epoch', epoch, 'nonce', args[3], 'step', from_step + 1, 'version', from_step,
    'committed', from_step, 'claimed_step', claimed_step, 'checkpoint', checkpoint)
  redis.call('HDEL', keys[1], 'sleep') -- the trainer that engines made room for is gone
  redis.call('PUBLISH', clock.events, 'publish')
  return claimed_step
end
