-- Groups of a snapshot, with their payloads, into a task whose clock does not exist yet.
-- KEYS[1] clock   ARGV incarnation to be, order, then per group: id, status, score (unused for pending, completed and
--   aborted, whose scores follow from their fields), number of fields, name, value of each, number of frames, index, frame
--   of each
-- Returns how many were written; 0 when the task is restored already.   Caller: Buffer.restore.
-- A repeat writes the same again; restore_task ends it.
local function restore_groups(keys, args)
  local found = redis.call('HMGET', keys[1], 'incarnation', 'restoring')
  if found[1] == args[1] then return 0 end
  if found[1] or (found[2] and found[2] ~= args[1]) then
    return fail('RUN_MISMATCH', 'the task exists here already, in another incarnation of the run')
  end
  redis.call('HSET', keys[1], 'restoring', args[1])
  local task = { prefix = string.sub(keys[1], 1, -6), order = args[2] }
  local at, count = 3, 0
  while at <= #args do
    local id, status, score, fields = args[at], args[at + 1], args[at + 2], tonumber(args[at + 3])
    local key, first_field = group_key(task.prefix, id), at + 4
    local frames_at = first_field + 2 * fields
    local frames = tonumber(args[frames_at])
    redis.call('HSET', key, unpack(args, first_field, frames_at - 1))
    if frames > 0 then redis.call('HSET', rollout_key(task.prefix, id), unpack(args, frames_at + 1, frames_at + 2 * frames)) end
    local group = redis.call('HMGET', key, 'oldest', 'arrival', 'deaths')
    if status == 'pending' then
      make_pending(task, id, tonumber(group[3]))
    elseif status == 'completed' or status == 'aborted' then
      file_result(task, id, status, tonumber(group[1]), tonumber(group[2]))
    else
      redis.call('HSET', key, 'status', status)
      redis.call('ZADD', task.prefix .. status, score, id)
    end
    at, count = frames_at + 1 + 2 * frames, count + 1
  end
  return count
end
