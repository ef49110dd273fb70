-- Moves the deadline until which other trainers are kept out, and stores what the trainer is doing, for monitors.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, epoch, nonce, lease_ms, doing
--   lease_ms: from now on; 0 lets them in   doing: JSON
-- Returns: 1
-- Caller: Training._renew; the trainer, rank 0
-- Repeat: moves the deadline again
local function renew_trainer(keys, args)
  local incarnation, epoch, nonce, lease_ms, doing = unpack(args)
  check_counts(lease_ms)
  check_given(doing)
  local prefix, err = read_run_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  local now = now_ms()
  -- stylua: ignore
  redis.call('HSET', prefix .. 'trainer', 'deadline_ms', now + tonumber(lease_ms), 'lease_ms', lease_ms,
    'doing', exact(now) .. ' ' .. doing)
  return 1
end
