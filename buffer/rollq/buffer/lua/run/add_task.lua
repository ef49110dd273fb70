-- Adds a task, whose clock exists, to the run's list, so that new epochs and new weights reach its clock.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, task
-- Returns: 1 when it was added, 0 when it was listed
-- Caller: Registry.register_task; every role, when it starts, and operators
-- Repeat: changes nothing
local function add_task(keys, args)
  local incarnation, task = unpack(args)
  if not task or #task > 64 or not string.find(task, '^[%w_.-]+$') then refuse_argument(task, 'the name of a task') end
  local prefix, err = read_run(keys[1], incarnation)
  if err then return err end
  return redis.call('SADD', prefix .. 'tasks', task)
end
