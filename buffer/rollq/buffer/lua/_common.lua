-- Shared by every function of the library: key names, the clock, the moves between status sets.
--
-- KEYS[1] of every task function is the task's clock; its other keys share the clock's hash tag and are built here and
-- nowhere else. KEYS[1] of every run function is the run's `run` hash, likewise.
--
-- Scores stay below 2^53, where doubles count exactly: 20 bits of version or step, 1 of evaluation, 32 of arrival.

local ARRIVALS = 4294967296 -- 2^32
local NO_TOKENS = 1048575   -- the "oldest version" of a group without tokens: it is never stale

local function fail(code, message)
  return redis.error_reply('ROLLQ_' .. code .. ' ' .. message)
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function exact(number)
  return string.format('%.0f', number)
end

-- One ZADD or ZREM for a whole batch: `arguments` is the flat list of scores and members, or of members.
local function many(command, key, arguments)
  if #arguments > 0 then redis.call(command, key, unpack(arguments)) end
end

local function group_key(prefix, id)
  return prefix .. 'group:' .. id
end

local function rollout_key(prefix, id)
  return prefix .. 'rollout:' .. id
end

local CLOCK_FIELDS = {
  'incarnation', 'epoch', 'nonce', 'step', 'version', 'threshold', 'control', 'events', 'order', 'expiry', 'expired',
  'group_size', 'min_valid', 'max_tries', 'max_deaths', 'lease_ms', 'audit', 'partial', 'committed', 'claimed_step',
  'checkpoint', 'history', 'max_uncheckpointed', 'resume', 'reaped_ms', 'hold_until_ms', 'batch_groups',
}
local CLOCK_STRINGS = {
  incarnation = true, nonce = true, control = true, events = true, order = true, expiry = true, expired = true,
  resume = true,
}

local function lost(key, found)
  if found then return key .. ' belongs to another incarnation of this run: the store was emptied, and the run begun again' end
  return key .. ' is gone: the store was emptied, or started again without its data'
end

-- The task's clock as a table (numbers where they are numbers), with `prefix`; or nil and an error reply.
local function read_clock(key, incarnation)
  local values = redis.call('HMGET', key, unpack(CLOCK_FIELDS))
  if values[1] ~= incarnation then
    return nil, fail('STORE_LOST', lost(key, values[1]))
  end
  local clock = { prefix = string.sub(key, 1, -6), key = key }
  for i, field in ipairs(CLOCK_FIELDS) do
    clock[field] = CLOCK_STRINGS[field] and values[i] or tonumber(values[i])
  end
  return clock
end

-- Like read_clock, for a trainer's call: epoch and nonce must be the live ones.
local function read_clock_as_trainer(key, incarnation, epoch, nonce)
  local clock, err = read_clock(key, incarnation)
  if err then return nil, err end
  if clock.epoch ~= tonumber(epoch) or clock.nonce ~= nonce then
    return nil, fail('FENCED', 'epoch ' .. epoch .. ' was replaced by epoch ' .. clock.epoch)
  end
  return clock
end

-- Highest version that is too old to be trained at `step`.
local function stale_version(clock, step)
  return step - 1 - clock.threshold
end

-- Groups that are under way or wait for the trainer, plus a batch for each trained step: what the target is compared
-- with. The steps count, not what was in their batches: a trainer that takes less than a batch leaves groups that still
-- are in completed, and for steps that another store saw nothing is owed.
local function scheduled(clock)
  local total = clock.committed * clock.batch_groups
  for _, status in ipairs({ 'pending', 'running', 'completed', 'claimed' }) do
    total = total + redis.call('ZCARD', clock.prefix .. status)
  end
  return total
end

local function pending_score(step, evaluation, arrival)
  return (step * 2 + evaluation) * ARRIVALS + arrival
end

-- Oldest version, then arrival. Scores differ, so that groups stand in their order of arrival and not of their names:
-- with a million of them, those that are claimed or expire together are then neighbours.
local function version_score(oldest, arrival)
  return oldest * ARRIVALS + arrival
end

local function result_score(clock, oldest, arrival)
  return clock.order == 'fifo' and arrival or version_score(oldest, arrival)
end

-- What is below this score, in the version index, is of version `stale` or older.
local function stale_bound(stale)
  return exact(version_score(math.max(stale, -1) + 1, 0))
end

-- running|aborted|expired|archived|claimed -> pending. The caller has removed it from its old set.
local function make_pending(clock, id, deaths)
  local key = group_key(clock.prefix, id)
  local fields = redis.call('HMGET', key, 'step', 'eval', 'arrival')
  redis.call('HSET', key, 'status', 'pending')
  redis.call('HDEL', key, 'nonce', 'worker', 'alone')
  redis.call('ZADD', clock.prefix .. 'pending', pending_score(tonumber(fields[1]), tonumber(fields[2]), tonumber(fields[3])), id)
  if deaths > 0 then redis.call('ZADD', clock.prefix .. 'suspects', deaths, id) end
end

-- Removes every trace of a group that is in no status set any more; counted under its reason.
local function drop_group(clock, id, reason)
  redis.call('UNLINK', group_key(clock.prefix, id), rollout_key(clock.prefix, id))
  redis.call('HINCRBY', clock.prefix .. 'progress', 'dropped_' .. reason, 1)
end

-- Files a group under failed or filtered, and drops the oldest one past the cap.
local function file_for_audit(clock, id, status, err)
  local set = clock.prefix .. status
  local key = group_key(clock.prefix, id)
  redis.call('HSET', key, 'status', status)
  if err ~= '' then redis.call('HSET', key, 'error', err) end
  redis.call('HDEL', key, 'nonce', 'worker', 'alone')
  redis.call('ZADD', set, redis.call('HGET', key, 'arrival'), id)
  redis.call('HINCRBY', clock.prefix .. 'progress', status, 1)
  if redis.call('ZCARD', set) > clock.audit then
    local oldest = redis.call('ZPOPMIN', set)
    drop_group(clock, oldest[1], status)
  end
end

-- Files a group under completed or aborted and into the version index.
local function file_result(clock, id, status, oldest, arrival)
  redis.call('HSET', group_key(clock.prefix, id), 'status', status)
  redis.call('ZADD', clock.prefix .. status, result_score(clock, oldest, arrival), id)
  redis.call('ZADD', clock.prefix .. 'by_version', version_score(oldest, arrival), id)
end

-- Lets no version of a group count as more than `cap`; returns its oldest one.
local function cap_versions(clock, id, cap)
  local key = group_key(clock.prefix, id)
  local group = redis.call('HMGET', key, 'versions', 'oldest')
  local oldest = tonumber(group[2])
  if oldest == NO_TOKENS then return oldest end
  local versions = string.gsub(group[1], '%d+', function(version) return exact(math.min(tonumber(version), cap)) end)
  oldest = math.min(oldest, cap)
  redis.call('HSET', key, 'versions', versions, 'oldest', oldest)
  return oldest
end

-- claimed|archived -> completed: as old as it counts by now, when its batch was claimed in an epoch that is dead.
local function file_claimed_again(clock, id, claimed_in)
  local floor = tonumber(redis.call('HGET', clock.key, 'floor:' .. claimed_in) or NO_TOKENS)
  local arrival = redis.call('HGET', group_key(clock.prefix, id), 'arrival')
  file_result(clock, id, 'completed', cap_versions(clock, id, floor), tonumber(arrival))
end

local function unfile_result(clock, id, status)
  redis.call('ZREM', clock.prefix .. status, id)
  redis.call('ZREM', clock.prefix .. 'by_version', id)
end

-- `versions` is one number per sample, comma separated; '-' = no tokens. Returns the new letters, the versions left,
-- and the list of the samples reset: those too old, or all of them when expiry is by group.
local function reset_stale(clock, letters, versions, stale)
  local index, reset, kept_letters, kept_versions = 0, {}, {}, {}
  for version in string.gmatch(versions, '[^,]+') do
    local old = version ~= '-' and tonumber(version) <= stale
    if old or clock.expiry == 'group' then
      reset[#reset + 1] = index
      kept_letters[#kept_letters + 1] = 'p'
      kept_versions[#kept_versions + 1] = '-'
    else
      kept_letters[#kept_letters + 1] = string.sub(letters, index + 1, index + 1)
      kept_versions[#kept_versions + 1] = version
    end
    index = index + 1
  end
  return table.concat(kept_letters), table.concat(kept_versions, ','), reset
end

-- Files groups under expired, or drops them, by setting; returns the word for it. `scored` is the flat list of their
-- arrivals and ids. The caller has removed them from their old sets, and their stale samples.
local function file_expired(clock, scored)
  redis.call('HINCRBY', clock.prefix .. 'progress', 'expired', #scored / 2)
  for i = 2, #scored, 2 do
    if clock.expired == 'drop' then
      drop_group(clock, scored[i], 'expired')
    else
      local key = group_key(clock.prefix, scored[i])
      redis.call('HSET', key, 'status', 'expired')
      redis.call('HDEL', key, 'nonce', 'worker', 'alone', 'reward')
    end
  end
  if clock.expired == 'drop' then return 'dropped' end
  many('ZADD', clock.prefix .. 'expired', scored)
  return 'expired'
end

-- Group ids of a manifest, as a list.
local function manifest_ids(manifest)
  local ids = {}
  for id in string.gmatch(redis.call('HGET', manifest, 'ids') or '', '[^,]+') do
    ids[#ids + 1] = id
  end
  return ids
end

-- Moves a whole batch from one status set to another, scored by step.
local function move_batch(clock, ids, from, to, step)
  local scored = {}
  for _, id in ipairs(ids) do
    scored[#scored + 1] = step
    scored[#scored + 1] = id
    redis.call('HSET', group_key(clock.prefix, id), 'status', to)
  end
  many('ZREM', clock.prefix .. from, ids)
  many('ZADD', clock.prefix .. to, scored)
end

-- A trained batch leaves claimed: kept for the checkpoint, or dropped at once when the run resumes fresh.
local function file_trained(clock, manifest, step)
  local ids = manifest_ids(manifest)
  local progress = clock.prefix .. 'progress'
  if clock.resume == 'fresh' then
    for _, id in ipairs(ids) do
      redis.call('ZREM', clock.prefix .. 'claimed', id)
      drop_group(clock, id, 'trained')
    end
    redis.call('HDEL', manifest, 'ids') -- nothing is left to serve again
  else
    move_batch(clock, ids, 'claimed', 'archived', step)
  end
  local consumed = redis.call('HINCRBY', progress, 'consumed', #ids)
  redis.call('HSET', manifest, 'committed', 1, 'consumed', consumed)
end

local function read_run(key, incarnation)
  local found = redis.call('HGET', key, 'incarnation')
  if found ~= incarnation then
    return nil, fail('STORE_LOST', lost(key, found))
  end
  return string.sub(key, 1, -4)
end

-- Like read_run, for a trainer's call: epoch and nonce must be the live ones.
local function read_run_as_trainer(key, incarnation, epoch, nonce)
  local prefix, err = read_run(key, incarnation)
  if err then return nil, err end
  local trainer = redis.call('HMGET', prefix .. 'trainer', 'epoch', 'nonce')
  if trainer[1] ~= epoch or trainer[2] ~= nonce then
    return nil, fail('FENCED', 'epoch ' .. epoch .. ' was replaced by epoch ' .. (trainer[1] or '?'))
  end
  return prefix
end
