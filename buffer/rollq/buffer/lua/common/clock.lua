-- Decisions that depend on a task's clock: what is too old, how groups are scored, and how many count.

-- Whether a copy of the buffer is taken: then nothing is dropped or reset.
local function is_saving(clock, now)
  return is_ahead(clock.saving_until_ms, clock.saving_ms or 0, now)
end

-- The highest version that is too old to be trained at `step`.
local function stale_version(clock, step)
  return step - 1 - clock.threshold
end

local function pending_score(step, evaluation, arrival)
  return (step * 2 + evaluation) * ARRIVALS + arrival
end

-- Orders groups by oldest version, then by arrival. No two groups have the same score, so Redis never falls back on the
-- text of their ids: even among a million groups, those that are claimed or expire together are neighbours.
local function version_score(oldest, arrival)
  return oldest * ARRIVALS + arrival
end

local function result_score(clock, oldest, arrival)
  return clock.order == 'fifo' and arrival or version_score(oldest, arrival)
end

-- Groups of version `stale` or older score below this in the version index.
local function stale_bound(stale)
  return exact(version_score(stale + 1, 0))
end

-- How many groups the batches of all steps up to `step` hold in total. A batch holds `batch_groups` groups until the
-- schedule ('step:groups,...') changes its size.
local function groups_through(clock, step)
  local total, from, size = 0, 1, clock.batch_groups
  for first, groups in string.gmatch(clock.schedule, '(%d+):(%d+)') do
    first = tonumber(first)
    if first > step then break end
    total, from, size = total + (first - from) * size, first, tonumber(groups)
  end
  return total + (step - from + 1) * size
end

-- The number of groups that is compared with the producer's target: those on their way to the trainer, plus a whole
-- batch for each trained step. A trainer that takes less than a batch leaves groups in completed, which still count.
-- Steps that were trained with another store count as whole batches, so nothing is produced for them.
local function scheduled(clock)
  local total = groups_through(clock, clock.committed)
  for _, status in ipairs(SCHEDULED) do
    total = total + redis.call('ZCARD', clock.prefix .. status)
  end
  return total
end

-- How many completed groups are fresh at `step`, and how many groups in generation would be too old one step later. The
-- batch waits for the latter: without them it would hold the quick, short answers and lose the long ones.
local function count_ready(clock, step)
  local completed, stale = clock.prefix .. 'completed', stale_version(clock, step)
  local ready
  if clock.order == 'fifo' then
    -- the version index holds completed and aborted groups; stale ones that are not swept yet all count as not ready
    local old = redis.call('ZCOUNT', clock.prefix .. 'by_version', '-inf', '(' .. stale_bound(stale))
    ready = math.max(0, redis.call('ZCARD', completed) - old)
  else
    ready = redis.call('ZCOUNT', completed, stale_bound(stale), '+inf')
  end
  local stragglers = 0
  if clock.stragglers == 'wait' then
    stragglers = redis.call('ZCOUNT', clock.prefix .. 'generating', stale + 1, stale + 1)
  end
  return ready, stragglers
end
