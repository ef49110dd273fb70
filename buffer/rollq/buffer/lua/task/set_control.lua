-- Lets a task's production run, or pauses or ends it.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, control, reason, only_from
--   control: run|pause|stopped|done   only_from: the control that the task must have, '' for any
-- Returns: 1, or 0 when the task has another control
-- Caller: Admission.set_control; operators, and the producer (stopped, done)
-- Repeat: changes nothing
local function set_control(keys, args)
  local incarnation, control, reason, only_from = unpack(args)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  if only_from ~= '' and clock.control ~= only_from then return 0 end
  -- the outcomes that stopped the task would stop it again
  if clock.control == 'stopped' and control == 'run' then redis.call('DEL', clock.prefix .. 'outcomes') end
  redis.call('HSET', clock.key, 'control', control, 'control_reason', reason)
  redis.call('PUBLISH', clock.events, EVENT.control)
  return 1
end
