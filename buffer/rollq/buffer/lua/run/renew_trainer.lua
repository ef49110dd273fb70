-- Moves the deadline until which other trainers are kept out.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, epoch, nonce, lease_ms
-- Returns: 1
-- Caller: Training.renew_trainer; the trainer, rank 0
-- Repeat: moves the deadline again
local function renew_trainer(keys, args)
  local incarnation, epoch, nonce, lease_ms = unpack(args)
  check_counts(lease_ms)
  local prefix, err = read_run_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  redis.call('HSET', prefix .. 'trainer', 'deadline_ms', now_ms() + tonumber(lease_ms), 'lease_ms', lease_ms)
  return 1
end
