-- claimed -> archived: the batch of a step has been trained. A task that has no part in the batch only moves on.
-- KEYS[1] clock   ARGV incarnation, epoch, nonce, step, takes part 0|1
-- Returns 1 committed, 0 it was already.   Caller: trainer, rank 0.   A repeat changes nothing.
local function commit(keys, args)
  local clock, err = read_clock_as_trainer(keys[1], args[1], args[2], args[3])
  if err then return err end
  local step = tonumber(args[4])
  if step <= clock.committed then return 0 end
  local manifest = clock.prefix .. 'manifest:' .. step
  if args[5] == '1' and (step ~= clock.committed + 1 or redis.call('HEXISTS', manifest, 'ids') == 0) then
    return fail('NOT_CLAIMED', 'step ' .. step .. ' cannot be committed: the last committed step is ' .. clock.committed
      .. ', the last claimed one ' .. clock.claimed_step)
  end
  file_trained(clock, manifest, step)
  redis.call('HSET', keys[1], 'committed', step, 'claimed_step', math.max(clock.claimed_step, step),
    'step', math.max(clock.step, step + 1))
  redis.call('PUBLISH', clock.events, 'commit')
  return 1
end
