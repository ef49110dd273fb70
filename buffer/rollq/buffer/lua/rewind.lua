-- What becomes of a batch that was claimed or trained after the checkpoint's step.
-- KEYS[1] clock   ARGV incarnation, epoch, nonce, step, mode
--   replay: archived -> claimed, the manifest stays (the same batch will be served again)
--   return: -> completed      regenerate: -> pending, nothing kept but the prompt
-- Returns how many groups it held.   Caller: trainer, every rank, after begin_epoch, for the last step first: whoever
-- takes over half way finds the steps that are left below claimed_step.   Idempotent by state.
local function rewind(keys, args)
  local clock, err = read_clock_as_trainer(keys[1], args[1], args[2], args[3])
  if err then return err end
  local step, mode = tonumber(args[4]), args[5]
  if step <= clock.committed or step > clock.claimed_step then return 0 end
  local manifest = clock.prefix .. 'manifest:' .. step
  local claimed_in = redis.call('HGET', manifest, 'epoch')
  if claimed_in == args[2] then return 0 end -- another rank of this launch was quicker, and has claimed it already
  local ids = manifest_ids(manifest)
  if mode == 'replay' then
    if redis.call('HDEL', manifest, 'committed', 'consumed') > 0 then move_batch(clock, ids, 'archived', 'claimed', step) end
    return #ids
  end
  for _, id in ipairs(ids) do
    local key = group_key(clock.prefix, id)
    redis.call('ZREM', clock.prefix .. 'archived', id)
    redis.call('ZREM', clock.prefix .. 'claimed', id)
    if mode == 'return' then
      file_claimed_again(clock, id, claimed_in)
    else
      local clone = redis.call('HGET', key, 'clone')
      if clone then
        local clone_status = redis.call('HGET', group_key(clock.prefix, clone), 'status')
        if clone_status then
          for _, set in ipairs({ clone_status, 'by_version', 'suspects', 'generating' }) do redis.call('ZREM', clock.prefix .. set, clone) end
          drop_group(clock, clone, 'reused')
        end
      end
      redis.call('HDEL', key, 'clone', 'uses', 'shaped')
      redis.call('UNLINK', rollout_key(clock.prefix, id))
      redis.call('HSET', key, 'letters', string.rep('p', clock.group_size), 'tries', 0)
      make_pending(clock, id, 0)
    end
  end
  redis.call('UNLINK', manifest)
  redis.call('HSET', keys[1], 'claimed_step', step - 1)
  return #ids
end
