-- A trainer takes the run: a new epoch with a nonce, and its checkpoint's weights as the live version.
-- KEYS[1] run hash   ARGV incarnation, trainer id, launch id, nonce, from_step, mode, uri, digest, lease ms, takeover 0|1
-- Returns epoch, nonce, from_step, mode.   Caller: trainer, every rank.
-- A repeat with the same launch id returns the same epoch: that is how all ranks of one launch share it.
local function begin_epoch_run(keys, args)
  local prefix, err = read_run(keys[1], args[1])
  if err then return err end
  local key, now = prefix .. 'trainer', now_ms()
  local trainer = redis.call('HMGET', key, 'epoch', 'nonce', 'trainer_id', 'launch_id', 'deadline_ms', 'from_step', 'mode')
  if trainer[4] == args[3] then
    return { tonumber(trainer[1]), trainer[2], tonumber(trainer[6]), trainer[7] }
  end
  if trainer[3] and trainer[3] ~= args[2] and tonumber(trainer[5]) > now and args[10] ~= '1' then
    return fail('TRAINER_HELD', 'trainer ' .. trainer[3] .. ' holds the run for another ' .. math.ceil((tonumber(trainer[5]) - now) / 1000)
      .. ' s; wait, or take over on purpose')
  end
  local epoch = tonumber(trainer[1] or '0') + 1
  redis.call('HSET', key, 'epoch', epoch, 'nonce', args[4], 'trainer_id', args[2], 'launch_id', args[3],
    'from_step', args[5], 'mode', args[6], 'deadline_ms', now + tonumber(args[9]))
  redis.call('HSET', prefix .. 'model', 'epoch', epoch, 'version', args[5], 'uri', args[7], 'digest', args[8], 'published_ms', now)
  redis.call('HSET', prefix .. 'versions', epoch .. ':' .. args[5], args[8])
  redis.call('SET', prefix .. 'model_version', args[5])
  return { epoch, args[4], tonumber(args[5]), args[6] }
end
