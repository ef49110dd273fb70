-- Announces that every task has been carried into the epoch: from now on, the launch's other ranks take part in it.
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
  redis.call('HSET', prefix .. 'trainer', 'announced', nonce)
  redis.call('PUBLISH', prefix .. 'events', EVENT.publish)
  return 1
end
