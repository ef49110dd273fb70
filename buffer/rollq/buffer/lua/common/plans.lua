-- The plan of a train step, in the run's slot: its sizes per task, and what ranks agree on while they claim it.

local function plan_key(prefix, step)
  return prefix .. 'plan:' .. step
end

-- Carries a plan into the live epoch. Returns its key, whether its batch was delivered, its round, and how often its
-- batch was released; or nil and an error reply. A batch that is replayed keeps its sizes; the numbers begin again at
-- 0, as in `claim_numbers`.
local function read_plan(prefix, epoch, step)
  local covered = redis.call('HGET', prefix .. 'trainer', 'covered') or '0'
  if tonumber(step) <= tonumber(covered) then
    return nil, fail('HISTORY_GONE', 'step %s is covered by the checkpoint of step %s', step, covered)
  end
  local key = plan_key(prefix, step)
  local planned_in, delivered, round, releases = fields(key, 'epoch', 'delivered', 'round', 'releases')
  if planned_in == epoch then return key, tonumber(delivered), tonumber(round), tonumber(releases) end
  redis.call('HSET', key, 'epoch', epoch, 'delivered', 0, 'round', 0, 'releases', 0)
  return key, 0, 0, 0
end

-- The parts in which a step's batch is trained while it fills, in order: for each, the groups per task up to its
-- end (JSON).
local function plan_parts(key)
  local parts = {}
  for part in string.gmatch(redis.call('HGET', key, 'parts') or '', '[^\n]+') do
    parts[#parts + 1] = part
  end
  return parts
end
