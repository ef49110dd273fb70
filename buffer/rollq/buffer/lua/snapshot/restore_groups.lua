-- Writes groups of a snapshot, with their payloads, into a task whose clock does not exist yet.
-- Moves: snapshot -> any status
-- KEYS: clock, payloads
-- ARGV: incarnation, order, priority_decay, then per group: id, status, score, field_count
--   incarnation: of the new run   order, priority_decay: of the task
--   score: unused for pending, completed and aborted, whose scores follow from their fields
--   each group is followed by name, value of its fields, the number of frames, and index, frame of each
-- Returns: how many were written; 0 when the task is restored already
-- Caller: Restoring._restore_groups; a restore
-- Repeat: writes the same again, until restore_task
local function file_restored(task, id, status, score)
  local oldest, arrival, deaths = group_fields(task, id, 'oldest', 'arrival', 'deaths')
  if status == 'pending' then
    make_pending(task, id, tonumber(deaths))
  elseif status == 'completed' or status == 'aborted' then
    file_result(task, id, status, tonumber(oldest), tonumber(arrival))
  else
    redis.call('HSET', group_key(task.prefix, id), 'status', status)
    redis.call('ZADD', task.prefix .. status, score, id)
  end
end

-- Restores the group at `at`; returns the position after it.
local function restore_group(task, args, at)
  local id, status, score, field_count = unpack(args, at, at + 3)
  local first_field = at + 4
  local frames_at = first_field + 2 * tonumber(field_count)
  local next_at = frames_at + 1 + 2 * tonumber(args[frames_at])
  redis.call('HSET', group_key(task.prefix, id), unpack(args, first_field, frames_at - 1))
  for first = frames_at + 1, next_at - 1, 2 * FIELDS_PER_CALL do
    local last = math.min(first + 2 * FIELDS_PER_CALL, next_at) - 1
    redis.call('HSET', rollout_key(task.prefix, id), unpack(args, first, last))
  end
  file_restored(task, id, status, score)
  return next_at
end

local function restore_groups(keys, args)
  local incarnation, order, priority_decay = unpack(args, 1, 3)
  local clock_key = keys[1]
  local wanted, err = may_restore(clock_key, incarnation)
  if err then return err end
  if not wanted then return 0 end
  redis.call('HSET', clock_key, 'restoring', incarnation)
  local task = { prefix = task_prefix(clock_key), order = order, priority_decay = tonumber(priority_decay) }
  local at, count = 4, 0
  while at <= #args do
    at, count = restore_group(task, args, at), count + 1
  end
  return count
end
