-- Begins a batch: groups that are gathered until all of them are finished, instead of completed one by one.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, batch_id, handle, kind, step, digest
--   handle: for a new batch   kind: train|eval; an evaluation is of the live version   digest: of the batch's content
-- Returns: the handle, and 1 when it is new, else 0
-- Caller: Evaluations.open_batch; coordinators, and the trainer
-- Repeat: with the same content returns the same handle; with the handle of a batch that is over opens nothing
local function pin_evaluation(clock)
  if clock.kind ~= 'eval' then return fail('EVALUATION', 'the task is trained on, and cannot be evaluated') end
  local pin = exact(clock.epoch) .. ':' .. exact(clock.version)
  if clock.pin ~= pin and clock.open_evaluations > 0 then
    return fail(
      'BATCH_EXISTS',
      'an evaluation of version %s (epoch:version) is under way: finalize or abort it',
      clock.pin
    )
  end
  write_clock(clock, { pin = pin, open_evaluations = clock.open_evaluations + 1 })
  return nil
end

-- The reply for a batch that is open under this id; nil without one.
local function find_open(clock, batch_id, existing, digest)
  local state, existing_digest = fields(batch_key(clock, existing), 'state', 'digest')
  if state ~= 'running' and state ~= 'finalizing' then return nil end
  if existing_digest ~= digest then
    return fail('BATCH_EXISTS', "batch '%s' is %s with other content", batch_id, state)
  end
  return { existing, 0 }
end

local function open_batch(keys, args)
  local incarnation, batch_id, handle, kind, step, digest = unpack(args)
  check_given(batch_id, handle, digest)
  check_choice(kind, 'train', 'eval')
  check_whole(step)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local batches = clock.prefix .. 'batches'
  local existing = redis.call('HGET', batches, batch_id)
  local open = existing and find_open(clock, batch_id, existing, digest)
  if open then return open end
  -- a late copy of the call: the batch is over
  if redis.call('EXISTS', batch_key(clock, handle)) == 1 then return { handle, 0 } end
  if kind == 'eval' then
    err = pin_evaluation(clock)
    if err then return err end
  elseif clock.kind == 'eval' then
    return fail('EVALUATION', 'groups of an evaluation are never trained')
  end
  redis.call('HSET', batches, batch_id, handle)
  -- stylua: ignore
  redis.call('HSET', batch_key(clock, handle), 'id', batch_id, 'state', 'running', 'type', kind, 'step', step,
    'digest', digest, 'epoch', clock.epoch, 'version', clock.version, 'size', 0, 'closed', 0, 'opened_ms', now_ms())
  wake(clock, EVENT.batch)
  return { handle, 1 }
end
