-- Undoes a batch that was claimed or trained after the checkpoint's step.
-- Moves: archived -> claimed (mode replay: the same batch is served again), claimed|archived -> completed (mode
--   return, and of a task that is offline), claimed|archived -> pending (mode regenerate: nothing is kept but the
--   prompt)
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, step, mode
-- Returns: how many groups it held
-- Caller: Training._rewind; the trainer, rank 0, after task_begin_epoch, the last step first
-- Repeat: changes nothing. A trainer that takes over half-way finds the remaining steps below claimed_step

-- Drops the copy of a group that is sampled again. A copy in the batch of an earlier step was trained on its own,
-- after an earlier rewind returned both.
local function drop_clone(clock, clone, step)
  local status = group_fields(clock, clone, 'status')
  if is_gone(status) then return end
  local is_held = status == 'claimed' or status == 'archived'
  if is_held and tonumber(redis.call('ZSCORE', clock.prefix .. status, clone)) < step then return end
  withdraw(clock, clone, status)
  drop_group(clock, clone, 'reused')
end

local function regenerate(clock, id, step)
  local clone = group_fields(clock, id, 'clone')
  if clone then drop_clone(clock, clone, step) end
  sample_anew(clock, id, 0)
end

local function rewind_group(clock, id, status, step, mode)
  withdraw(clock, id, status)
  if mode == 'return' or clock.offline == 1 then -- nobody would sample it again
    return_to_completed(clock, id)
  else
    regenerate(clock, id, step)
  end
end

local function rewind(keys, args)
  local incarnation, epoch, nonce, step, mode = unpack(args)
  check_whole(step)
  check_choice(mode, 'replay', 'return', 'regenerate')
  local clock, err = read_clock_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  step = tonumber(step)
  if step <= clock.committed or step > clock.claimed_step then return 0 end
  local manifest = manifest_key(clock, step)
  -- a repeated call, or another rank is ahead: this epoch has claimed it since
  if redis.call('HGET', manifest, 'numbered_in') == epoch then return 0 end
  local ids = manifest_ids(manifest)
  if mode == 'replay' then
    if redis.call('HDEL', manifest, 'committed', 'consumed', 'committed_ms') > 0 then
      move_batch(clock, ids, 'archived', 'claimed', step)
    end
    return #ids
  end
  for _, id in ipairs(ids) do
    local status = group_fields(clock, id, 'status')
    if not is_gone(status) then rewind_group(clock, id, status, step, mode) end -- else dropped as the copy of another
  end
  redis.call('UNLINK', manifest)
  write_clock(clock, { undone = math.max(clock.undone, step), claimed_step = step - 1 })
  return #ids
end
