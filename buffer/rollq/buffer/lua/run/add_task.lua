-- Adds a task to the run's list, by which a new epoch and new weights reach its clock.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, task
-- Returns: epoch, nonce, version and from_step of the run, for the task's new clock
-- Caller: BufferCore.register_task; every role, when it starts
-- Repeat: changes nothing
local function add_task(keys, args)
  local incarnation, task = unpack(args)
  local prefix, err = read_run(keys[1], incarnation)
  if err then return err end
  redis.call('SADD', prefix .. 'tasks', task)
  local epoch, nonce, from_step = fields(prefix .. 'trainer', 'epoch', 'nonce', 'from_step')
  local version = redis.call('HGET', prefix .. 'model', 'version')
  return { tonumber(epoch or '0'), nonce or '', tonumber(version or '-1'), tonumber(from_step or '0') }
end
