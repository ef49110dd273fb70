-- A trainer takes the run: a new epoch with a nonce, and the weights of its checkpoint as the live version.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, trainer_id, launch_id, nonce, from_step, mode, uri, digest, lease_ms, takeover
--   takeover: 1 to replace a trainer that is alive
-- Returns: epoch, nonce, from_step, mode
-- Caller: Training.begin_epoch; the trainer, every rank
-- Repeat: with the same launch id returns the same epoch, which is how all ranks of a launch share it
local function run_begin_epoch(keys, args)
  local incarnation, trainer_id, launch_id, nonce, from_step, mode, uri, digest, lease_ms, takeover = unpack(args)
  local prefix, err = read_run(keys[1], incarnation)
  if err then return err end
  local trainer, now = prefix .. 'trainer', now_ms()
  local live_epoch, live_nonce, live_trainer, live_launch, deadline_ms, live_from_step, live_mode =
    fields(trainer, 'epoch', 'nonce', 'trainer_id', 'launch_id', 'deadline_ms', 'from_step', 'mode')
  if live_launch == launch_id then return { tonumber(live_epoch), live_nonce, tonumber(live_from_step), live_mode } end
  local left_ms = tonumber(deadline_ms or '0') - now
  if live_trainer and live_trainer ~= trainer_id and left_ms > 0 and takeover ~= '1' then
    return fail(
      'TRAINER_HELD',
      'trainer %s holds the run for another %s s; wait, or take over on purpose',
      live_trainer,
      math.ceil(left_ms / 1000)
    )
  end
  local epoch = tonumber(live_epoch or '0') + 1
  -- stylua: ignore
  redis.call('HSET', trainer, 'epoch', epoch, 'nonce', nonce, 'trainer_id', trainer_id, 'launch_id', launch_id,
    'from_step', from_step, 'mode', mode, 'deadline_ms', now + tonumber(lease_ms))
  -- stylua: ignore
  redis.call('HSET', prefix .. 'model', 'epoch', epoch, 'version', from_step, 'uri', uri, 'digest', digest,
    'published_ms', now)
  redis.call('HSET', prefix .. 'versions', epoch .. ':' .. from_step, digest)
  redis.call('SET', prefix .. 'model_version', from_step)
  return { epoch, nonce, tonumber(from_step), mode }
end
