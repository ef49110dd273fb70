-- Lets a task's production go on, pause or end.
-- KEYS[1] clock   ARGV incarnation, run|pause|stopped|done, reason, control that it must have or ''
-- Returns 1, 0 when it has another control.   Caller: operator; producer (stopped, done).   A repeat changes nothing.
-- Going on forgets the outcomes that may have stopped it.
local function set_control(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  if args[4] ~= '' and clock.control ~= args[4] then return 0 end
  if clock.control == 'stopped' and args[2] == 'run' then redis.call('DEL', clock.prefix .. 'outcomes') end
  redis.call('HSET', keys[1], 'control', args[2], 'control_reason', args[3])
  redis.call('PUBLISH', clock.events, 'control')
  return 1
end
