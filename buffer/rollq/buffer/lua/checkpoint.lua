-- archived -> gone: a checkpoint covers these steps, nobody will ask for their batches again.
-- KEYS[1] clock   ARGV incarnation, epoch, nonce, step, limit
-- Returns more 0|1: call again.   Caller: trainer, rank 0.   Idempotent by state.
-- The manifest of `step` itself stays: a resume from this checkpoint restores its counters.
local function checkpoint(keys, args)
  local clock, err = read_clock_as_trainer(keys[1], args[1], args[2], args[3])
  if err then return err end
  local step, limit = tonumber(args[4]), tonumber(args[5])
  if step > clock.committed then
    return fail('NOT_CLAIMED', 'step ' .. step .. ' is not committed yet; the last committed step is ' .. clock.committed)
  end
  if step < clock.checkpoint then return 0 end
  if clock.saving_until_ms > now_ms() then return 0 end -- a copy of the buffer is being taken: the next one covers this
  local archived = clock.prefix .. 'archived'
  local ids = redis.call('ZRANGEBYSCORE', archived, '-inf', step, 'LIMIT', 0, limit)
  redis.call('HSET', keys[1], 'checkpoint', step, 'history', step)
  for old = clock.history, step - 1 do redis.call('UNLINK', clock.prefix .. 'manifest:' .. old) end
  for _, id in ipairs(ids) do
    redis.call('ZREM', archived, id)
    drop_group(clock, id, 'trained')
  end
  return #ids == limit and 1 or 0
end
