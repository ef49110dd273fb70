-- Names a task in the run, so that publish and begin_epoch reach its clock.
-- KEYS[1] run hash   ARGV incarnation, task
-- Returns epoch, nonce, version, step of the run, for the task's new clock.   Caller: register_task.   Idempotent (a set).
local function add_task(keys, args)
  local prefix, err = read_run(keys[1], args[1])
  if err then return err end
  redis.call('SADD', prefix .. 'tasks', args[2])
  local trainer = redis.call('HMGET', prefix .. 'trainer', 'epoch', 'nonce', 'from_step')
  local version = redis.call('HGET', prefix .. 'model', 'version')
  return { tonumber(trainer[1] or '0'), trainer[2] or '', tonumber(version or '-1'), tonumber(trainer[3] or '0') }
end
