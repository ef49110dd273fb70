-- Announces that every task has been carried into the epoch: from now on, the launch's other ranks take part in it, and
-- replays are compared with its weights. Until then, replays are compared with the weights of the recorded batches.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, epoch, nonce
-- Returns: 1
-- Caller: Training.begin_epoch; the trainer, rank 0
-- Repeat: writes the same again
local function announce_epoch(keys, args)
  local incarnation, epoch, nonce = unpack(args)
  local prefix, err = read_run_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  local trainer = prefix .. 'trainer'
  redis.call('HSET', trainer, 'announced', nonce)
  local from_step = redis.call('HGET', trainer, 'from_step')
  local version, digest = fields(prefix .. 'model', 'version', 'digest')
  if version == from_step then redis.call('HSET', prefix .. 'versions', version, digest) end
  redis.call('PUBLISH', prefix .. 'events:' .. EVENT.publish, '')
  return 1
end
