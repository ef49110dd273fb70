-- claimed -> completed, dropped or failed: a batch that will not be trained.
-- KEYS[1] clock   ARGV incarnation, epoch, nonce, step, mode return|drop|quarantine, round up to which it was claimed (-1:
-- any), then ids to quarantine in any mode
-- Returns how many groups it held.   Caller: trainer, rank 0; any rank that undoes a torn claim.
-- A repeat finds no manifest and returns 0.
local function release(keys, args)
  local clock, err = read_clock_as_trainer(keys[1], args[1], args[2], args[3])
  if err then return err end
  local step, mode = tonumber(args[4]), args[5]
  if step <= clock.committed then return fail('COMMITTED', 'step ' .. step .. ' is committed and cannot be released') end
  local manifest = clock.prefix .. 'manifest:' .. step
  local round = tonumber(args[6])
  if round >= 0 and tonumber(redis.call('HGET', manifest, 'round') or '0') > round then return 0 end
  local ids = manifest_ids(manifest)
  local claimed_in = redis.call('HGET', manifest, 'epoch')
  local bad = {}
  for i = 7, #args do bad[args[i]] = true end
  for _, id in ipairs(ids) do
    redis.call('ZREM', clock.prefix .. 'claimed', id)
    if mode == 'quarantine' or bad[id] then
      file_for_audit(clock, id, 'failed', 'quarantined by the trainer at step ' .. step)
    elseif mode == 'return' then
      file_claimed_again(clock, id, claimed_in)
    else
      drop_group(clock, id, 'released')
    end
  end
  redis.call('UNLINK', manifest)
  -- a replay may hold the batches of later steps already
  if step == clock.claimed_step then redis.call('HSET', keys[1], 'claimed_step', step - 1) end
  redis.call('PUBLISH', clock.events, 'release')
  return #ids
end
