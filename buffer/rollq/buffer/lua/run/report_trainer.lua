-- Stores the trainer's report of its last step, for monitors.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, epoch, nonce, report
--   report: JSON
-- Returns: 1
-- Caller: Training.report_trainer; the trainer, rank 0
-- Repeat: writes the same again
local function report_trainer(keys, args)
  local incarnation, epoch, nonce, report = unpack(args)
  check_given(report)
  local prefix, err = read_run_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  redis.call('HSET', prefix .. 'trainer', 'report', exact(now_ms()) .. ' ' .. report)
  return 1
end
