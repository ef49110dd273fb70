-- Decisions that depend on a task's clock: what is too old, how groups are scored, and how many count.

-- Whether the buffer is being saved: then nothing is dropped or reset.
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
