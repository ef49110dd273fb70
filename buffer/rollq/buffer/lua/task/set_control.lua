-- Lets a task's production run, or pauses or ends it.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, control, reason, only_from, revision
--   control: run|pause|stopped|done   only_from: the control that the task must have, '' for any
--   revision: of the task's control, as the caller has read it
-- Returns: 1, 0 when the task has another control, or -1 when its control has changed since the caller read it
-- Caller: Admission.set_control; operators, and the producer (stopped, done)
-- Repeat: returns -1, and so does a copy of the call that arrives after a later one
local function set_control(keys, args)
  local incarnation, control, reason, only_from, revision = unpack(args)
  check_choice(control, 'run', 'pause', 'stopped', 'done')
  check_given(reason, only_from)
  check_whole(revision)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  if only_from ~= '' and clock.control ~= only_from then return 0 end
  if clock.control_revision ~= tonumber(revision) then return -1 end
  -- the outcomes that stopped the task would stop it again
  if clock.control == 'stopped' and control == 'run' then
    redis.call('DEL', clock.prefix .. 'outcomes')
    redis.call('HDEL', clock.prefix .. 'progress', 'failed_in_a_row')
  end
  write_clock(clock, {
    control = control,
    control_reason = reason,
    control_revision = clock.control_revision + 1,
  })
  wake(clock, EVENT.control)
  return 1
end
