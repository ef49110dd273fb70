-- Removes the clock of a task without groups, which a role made for a run that was already gone.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation
--   incarnation: of the run that is gone
-- Returns: 1 when the clock was removed, 0 when it is not of that run, or the task has had groups
-- Caller: BufferCore._discard_leftover; roles that create a task, a restore
-- Repeat: finds no clock, or one of another run
local function discard_task(keys, args)
  local incarnation = unpack(args)
  check_given(incarnation)
  local clock_key = keys[1]
  local prefix = task_prefix(clock_key)
  if fields(clock_key, 'incarnation') ~= incarnation then return 0 end
  if tonumber(redis.call('HGET', prefix .. 'progress', 'admitted') or '0') > 0 then return 0 end
  redis.call('UNLINK', clock_key, prefix .. 'progress', prefix .. 'rules')
  return 1
end
