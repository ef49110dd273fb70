-- Makes engines give their memory to the trainer, or lets them continue. The task's control stays as it is.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, why, revision
--   why: the reason, which also identifies this sleep; '' to wake engines
--   revision: of the task's control, as the caller has read it
-- Returns: 1, or -1 when the control has changed since the caller read it
-- Caller: Training.sleep; the trainer, rank 0
-- Repeat: returns -1, and so does a copy of the call that arrives after a later one
local function sleep(keys, args)
  local incarnation, epoch, nonce, why, revision = unpack(args)
  check_given(why)
  check_whole(revision)
  local clock, err = read_clock_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  if clock.control_revision ~= tonumber(revision) then return -1 end
  write_clock(clock, { control_revision = clock.control_revision + 1, sleep = why ~= '' and why })
  wake(clock, EVENT.control)
  return 1
end
