-- Shared by every function of the library: key names, the clock, the moves between status sets.
--
-- KEYS[1] of every task function is the task's clock; its other keys share the clock's hash tag and are built here and
-- nowhere else. KEYS[1] of every run function is the run's `run` hash, likewise.
--
-- Scores stay below 2^53, where doubles count exactly: 20 bits of version or step, 1 of evaluation, 32 of arrival.

local ARRIVALS = 4294967296 -- 2^32
local NO_TOKENS = 1048575   -- the "oldest version" of a group without tokens: it is never stale
local BATCHES_KEPT = 200     -- of those that are over

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
  'checkpoint', 'history', 'max_uncheckpointed', 'resume', 'reaped_ms', 'hold_until_ms', 'batch_groups', 'schedule',
  'kind', 'token_shift', 'max_uses', 'cooldown', 'stragglers', 'interruptions', 'keep_window', 'saving_until_ms', 'pin',
  'open_evaluations', 'prompt_stats', 'sleep',
}
local CLOCK_STRINGS = {
  incarnation = true, nonce = true, control = true, events = true, order = true, expiry = true, expired = true,
  resume = true, schedule = true, kind = true, stragglers = true, pin = true, sleep = true,
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

-- Groups that the batches of all steps up to `step` take together: batch_groups each, until the schedule
-- ('step:groups,...') says otherwise.
local function groups_through(clock, step)
  local total, from, size = 0, 1, clock.batch_groups
  for first, groups in string.gmatch(clock.schedule, '(%d+):(%d+)') do
    first = tonumber(first)
    if first > step then break end
    total, from, size = total + (first - from) * size, first, tonumber(groups)
  end
  return total + (step - from + 1) * size
end

-- Groups that are under way or wait for the trainer, plus a batch for each trained step: what the target is compared
-- with. The steps count, not what was in their batches: a trainer that takes less than a batch leaves groups that still
-- are in completed, and for steps that another store saw nothing is owed.
local function scheduled(clock)
  local total = groups_through(clock, clock.committed)
  for _, status in ipairs({ 'pending', 'running', 'completed', 'gathered', 'cooling', 'claimed' }) do
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
  return exact(version_score(stale + 1, 0))
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

-- running -> nowhere yet: the caller files it.
local function end_lease(clock, id)
  redis.call('ZREM', clock.prefix .. 'running', id)
  redis.call('ZREM', clock.prefix .. 'generating', id)
end

-- One new group -> pending. `batch`: handle of the batch that gathers it, or false.
local function create_group(clock, id, step, evaluation, now, batch, prompt)
  local key = group_key(clock.prefix, id)
  redis.call('HSET', key, 'status', 'pending', 'arrival', id, 'attempt', 0, 'tries', 0, 'deaths', 0, 'step', step,
    'eval', evaluation, 'letters', string.rep('p', clock.group_size), 'admitted_ms', now, 'prompt', prompt)
  if batch then redis.call('HSET', key, 'batch', batch) end
  redis.call('ZADD', clock.prefix .. 'pending', pending_score(step, evaluation, id), id)
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
  local batch = redis.call('HGET', key, 'batch')
  if batch then redis.call('HINCRBY', clock.prefix .. 'batch:' .. batch, status, 1) end
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

-- Lets no token of a group count as newer than version `cap`; returns the version that the group counts as.
local function cap_versions(clock, id, cap)
  cap = cap + clock.token_shift
  local key = group_key(clock.prefix, id)
  local group = redis.call('HMGET', key, 'versions', 'oldest')
  local oldest = tonumber(group[2])
  if oldest == NO_TOKENS then return oldest end
  local versions = string.gsub(group[1], '%-?%d+', function(version) return exact(math.min(tonumber(version), cap)) end)
  oldest = math.min(oldest, cap)
  redis.call('HSET', key, 'versions', versions, 'oldest', oldest)
  return oldest
end

-- How old a group of a batch counts by now, when the batch was claimed in an epoch that is dead.
local function cap_claimed(clock, id, claimed_in)
  return cap_versions(clock, id, tonumber(redis.call('HGET', clock.key, 'floor:' .. claimed_in) or NO_TOKENS))
end

-- claimed|archived -> completed
local function file_claimed_again(clock, id, claimed_in)
  local arrival = redis.call('HGET', group_key(clock.prefix, id), 'arrival')
  file_result(clock, id, 'completed', cap_claimed(clock, id, claimed_in), tonumber(arrival))
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

-- The oldest version among the samples that a group still has: `oldest` may speak of those that were reset.
local function oldest_kept(letters, versions)
  local index, oldest = 0, NO_TOKENS
  for version in string.gmatch(versions or '', '[^,]+') do
    index = index + 1
    if version ~= '-' and string.sub(letters, index, index) ~= 'p' then oldest = math.min(oldest, tonumber(version)) end
  end
  return oldest
end

-- Takes the stale samples of a group, or all of them, out of its payload.
local function reset_group(clock, id, stale)
  local key = group_key(clock.prefix, id)
  local group = redis.call('HMGET', key, 'letters', 'versions')
  local letters, versions, reset = reset_stale(clock, group[1], group[2], stale)
  if string.find(letters, '[^p]') then
    redis.call('HDEL', rollout_key(clock.prefix, id), unpack(reset))
  else
    redis.call('UNLINK', rollout_key(clock.prefix, id))
  end
  redis.call('HSET', key, 'letters', letters, 'versions', versions)
  redis.call('HDEL', key, 'shaped')
end

-- Files groups under expired, or drops them, by setting; returns how many were filed. `scored` is the flat list of their
-- arrivals and ids. The caller has removed them from their old sets, and their stale samples.
-- What was trained before is not sampled again: its prompt has had its turn.
local function file_expired(clock, scored)
  local kept = {}
  redis.call('HINCRBY', clock.prefix .. 'progress', 'expired', #scored / 2)
  for i = 2, #scored, 2 do
    local key = group_key(clock.prefix, scored[i])
    if redis.call('HEXISTS', key, 'uses') == 1 then
      drop_group(clock, scored[i], 'reused')
    elseif clock.expired == 'drop' then
      drop_group(clock, scored[i], 'expired')
    else
      redis.call('HSET', key, 'status', 'expired')
      redis.call('HDEL', key, 'nonce', 'worker', 'alone', 'reward')
      kept[#kept + 1], kept[#kept + 2] = scored[i - 1], scored[i]
    end
  end
  many('ZADD', clock.prefix .. 'expired', kept)
  return #kept / 2
end

-- How many completed groups are fresh at `step`, and how many in generation would be too old at the step after it, which
-- the batch waits for: taking the quick ones first would train on short answers, and lose the long ones.
local function readiness(clock, step)
  local completed, stale = clock.prefix .. 'completed', stale_version(clock, step)
  local ready
  if clock.order == 'fifo' then
    -- stale groups of both kinds are in one index; those not swept yet are few, and counted as not ready
    ready = math.max(0, redis.call('ZCARD', completed) - redis.call('ZCOUNT', clock.prefix .. 'by_version', '-inf', '(' .. stale_bound(stale)))
  else
    ready = redis.call('ZCOUNT', completed, stale_bound(stale), '+inf')
  end
  local stragglers = 0
  if clock.stragglers == 'wait' then stragglers = redis.call('ZCOUNT', clock.prefix .. 'generating', stale + 1, stale + 1) end
  return ready, stragglers
end

-- pending|running|gathered -> aborted: an unfinished group of a batch that ends without it joins the pool of those that
-- were interrupted, with what it has.
local function leave_batch(clock, id)
  local key = group_key(clock.prefix, id)
  local group = redis.call('HMGET', key, 'status', 'arrival', 'letters', 'versions')
  redis.call('HDEL', key, 'batch', 'nonce', 'worker', 'alone')
  if group[1] ~= 'pending' and group[1] ~= 'running' and group[1] ~= 'gathered' then return end
  redis.call('ZREM', clock.prefix .. group[1], id)
  redis.call('ZREM', clock.prefix .. 'suspects', id)
  redis.call('ZREM', clock.prefix .. 'generating', id)
  local oldest = oldest_kept(group[3], group[4])
  redis.call('HSET', key, 'oldest', oldest)
  redis.call('HSETNX', key, 'versions', string.rep('-,', clock.group_size - 1) .. '-')
  file_result(clock, id, 'aborted', oldest, tonumber(group[2]))
end

-- The end of a batch, whose groups have left it. What came of it is kept for whoever asks again, for the last ones.
local function end_batch(clock, handle, state, result)
  local batch, over = clock.prefix .. 'batch:' .. handle, clock.prefix .. 'batches_over'
  redis.call('UNLINK', batch .. ':groups')
  redis.call('HSET', batch, 'state', state, 'result', result)
  if redis.call('HGET', batch, 'type') == 'eval' then redis.call('HINCRBY', clock.key, 'open_evaluations', -1) end
  if redis.call('RPUSH', over, handle) > BATCHES_KEPT then
    local oldest = redis.call('LPOP', over)
    local id = redis.call('HGET', clock.prefix .. 'batch:' .. oldest, 'id')
    if id and redis.call('HGET', clock.prefix .. 'batches', id) == oldest then redis.call('HDEL', clock.prefix .. 'batches', id) end
    redis.call('UNLINK', clock.prefix .. 'batch:' .. oldest)
  end
  redis.call('PUBLISH', clock.events, 'batch')
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

-- A group that may be trained once more lives on as a new one with the same samples; the old one goes the way of all
-- trained groups. `clone` makes this happen once, however often its step is trained.
local function clone_for_reuse(clock, id, step, claimed_in)
  local key = group_key(clock.prefix, id)
  local group = redis.call('HMGET', key, 'uses', 'clone', 'oldest')
  local uses, due = tonumber(group[1] or '0') + 1, step + 1 + clock.cooldown
  local oldest = tonumber(group[3])
  if uses >= clock.max_uses or group[2] or oldest <= stale_version(clock, due) then return end
  local clone = redis.call('HINCRBY', clock.prefix .. 'progress', 'admitted', 1)
  redis.call('HINCRBY', clock.prefix .. 'progress', 'reused', 1)
  redis.call('COPY', key, group_key(clock.prefix, clone))
  redis.call('COPY', rollout_key(clock.prefix, id), rollout_key(clock.prefix, clone))
  redis.call('HSET', key, 'clone', clone)
  redis.call('HSET', group_key(clock.prefix, clone), 'arrival', clone, 'uses', uses, 'status', 'cooling')
  cap_claimed(clock, clone, claimed_in)
  redis.call('ZADD', clock.prefix .. 'cooling', due, clone)
end

-- cooling -> completed: what may be trained again from `step` on; expired when it is too old by now.
local function end_cooling(clock, step)
  local ids = redis.call('ZRANGEBYSCORE', clock.prefix .. 'cooling', '-inf', step)
  many('ZREM', clock.prefix .. 'cooling', ids)
  local stale = {}
  for _, id in ipairs(ids) do
    local group = redis.call('HMGET', group_key(clock.prefix, id), 'oldest', 'arrival')
    local oldest, arrival = tonumber(group[1]), tonumber(group[2])
    if oldest <= stale_version(clock, step) then
      stale[#stale + 1], stale[#stale + 2] = arrival, id
    else
      file_result(clock, id, 'completed', oldest, arrival)
    end
  end
  if #stale > 0 then file_expired(clock, stale) end
end

-- archived -> gone, when the run resumes fresh: what was kept only because a copy of the buffer was being taken.
local function drop_held(clock)
  local held = redis.call('ZRANGE', clock.prefix .. 'archived', 0, 999, 'WITHSCORES')
  for i = 1, #held, 2 do
    redis.call('ZREM', clock.prefix .. 'archived', held[i])
    drop_group(clock, held[i], 'trained')
    redis.call('HDEL', clock.prefix .. 'manifest:' .. held[i + 1], 'ids')
  end
end

-- A trained batch leaves claimed: kept for the checkpoint, or dropped at once when the run resumes fresh.
local function file_trained(clock, manifest, step)
  local ids = manifest_ids(manifest)
  local progress = clock.prefix .. 'progress'
  if clock.max_uses > 1 then
    local claimed_in = redis.call('HGET', manifest, 'epoch')
    for _, id in ipairs(ids) do clone_for_reuse(clock, id, step, claimed_in) end
    end_cooling(clock, step + 1)
  end
  if clock.resume == 'fresh' and clock.saving_until_ms < now_ms() then
    for _, id in ipairs(ids) do
      redis.call('ZREM', clock.prefix .. 'claimed', id)
      drop_group(clock, id, 'trained')
    end
    redis.call('HDEL', manifest, 'ids') -- nothing is left to serve again
    drop_held(clock)
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
