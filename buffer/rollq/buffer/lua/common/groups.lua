-- The moves of one group between status sets.

-- Takes a group out of its status set and out of every index.
local function withdraw(clock, id, status)
  for _, set in ipairs({ status, 'suspects', 'generating', 'by_version' }) do
    redis.call('ZREM', clock.prefix .. set, id)
  end
  if group_fields(clock, id, 'offered') then redis.call('ZREM', clock.prefix .. 'offers', id) end
end

local function forget_lease(key)
  -- stylua: ignore
  redis.call('HDEL', key, 'nonce', 'worker', 'alone', 'confirmed', 'leased_ms', 'offered', 'offer_calls', 'loans',
    'loan_parts')
end

-- A group's `history`, for display, has a line for each ended lease: attempt, until (ms), how it ended (a word), parts
-- of samples that were salvaged by then, and its `leased` (see `grant`). A last lease that ended by `put` is not in the
-- history: the group keeps its `leased`, and `put_ms` is its end, so that `put` need not write the history.
local note_lease
do
  local LEASES_KEPT, MOST_HISTORY_BYTES = 16, 2000

  -- The history after one more lease. Beyond its limits, the oldest lines go.
  local function with_lease(history, line)
    if not history then return line end
    local lines = history .. '\n' .. line
    local _, older = string.gsub(lines, '\n', '')
    while older >= LEASES_KEPT or (older > 0 and #lines > MOST_HISTORY_BYTES) do
      lines = string.sub(lines, string.find(lines, '\n', 1, true) + 1)
      older = older - 1
    end
    return lines
  end

  -- Moves a group's last lease, which ended at `until_ms`, to its history.
  function note_lease(key, how, until_ms)
    local history, attempt, leased, parts = fields(key, 'history', 'attempt', 'leased', 'parts')
    local line = table.concat({ attempt, until_ms, how, parts or '0', leased }, ' ')
    redis.call('HSET', key, 'history', with_lease(history, line))
    redis.call('HDEL', key, 'leased')
  end
end

-- new -> pending. `batch`: handle of the batch that gathers the group, or false.
local function create_group(clock, id, step, evaluation, now, batch, prompt)
  local key = group_key(clock.prefix, id)
  -- stylua: ignore
  redis.call('HSET', key, 'status', 'pending', 'arrival', id, 'attempt', 0, 'tries', 0, 'deaths', 0, 'step', step,
    'eval', evaluation, 'letters', no_letters(clock), 'admitted_ms', now, 'prompt', prompt)
  if batch then redis.call('HSET', key, 'batch', batch) end
  redis.call('ZADD', clock.prefix .. 'pending', pending_score(step, evaluation, id), id)
end

-- any status -> pending. The caller has withdrawn the group.
local function make_pending(clock, id, deaths)
  local key = group_key(clock.prefix, id)
  local step, evaluation, arrival, leased, put_ms = fields(key, 'step', 'eval', 'arrival', 'leased', 'put_ms')
  local score = pending_score(tonumber(step), tonumber(evaluation), tonumber(arrival))
  if leased and put_ms then note_lease(key, 'put', put_ms) end
  redis.call('HSET', key, 'status', 'pending')
  forget_lease(key)
  redis.call('ZADD', clock.prefix .. 'pending', score, id)
  if deaths > 0 then redis.call('ZADD', clock.prefix .. 'suspects', deaths, id) end
end

-- any status -> pending, with nothing but the prompt. The caller has withdrawn the group.
local function sample_anew(clock, id, deaths)
  local key = group_key(clock.prefix, id)
  redis.call('HDEL', key, 'clone', 'copy_of', 'uses', 'priority', 'shaped', 'rows', 'error')
  drop_frames(clock, id)
  redis.call('HSET', key, 'letters', no_letters(clock), 'tries', 0)
  make_pending(clock, id, deaths)
end

-- The first group that may have one of the task's prompts: the rows of earlier groups belong to former prompts.
local function first_of_prompts(clock)
  return tonumber(redis.call('HGET', clock.prefix .. 'progress', 'prompts_from') or '1')
end

-- Removes every trace of a group that was withdrawn, and counts it under its reason.
local function remove_group(clock, id, reason)
  local progress, payload, bytes = clock.prefix .. 'progress', group_fields(clock, id, 'payload', 'bytes')
  unlink_frames(clock, id, payload, group_key(clock.prefix, id))
  redis.call('HINCRBY', progress, 'dropped_' .. reason, 1)
  -- not a number if it was changed by hand, which must not block the archive
  if is_count(bytes) then redis.call('HINCRBY', progress, 'bytes', -tonumber(bytes)) end
end

local function is_gone(status)
  return not status or status == 'leaving'
end

-- any status -> leaving, for the archive, or gone without one. The caller has withdrawn the group. A copy that is not
-- trained again (`reused`) is not archived: the archive has its samples from the group that was trained. `step`: the
-- step that trained it; by default the next step.
local function drop_group(clock, id, reason, step)
  if clock.archive ~= 1 or reason == 'reused' then return remove_group(clock, id, reason) end
  local key, now = group_key(clock.prefix, id), now_ms()
  if redis.call('HGET', key, 'status') == 'running' then note_lease(key, 'dropped', exact(now)) end
  redis.call('HSET', key, 'status', 'leaving', 'left', reason, 'left_ms', now)
  forget_lease(key)
  redis.call('ZADD', clock.prefix .. 'leaving', step or clock.step, id)
end

-- Remembers the newest error of the task, for display.
local function note_error(clock, err)
  local text = string.sub(err, 1, MOST_ERROR_BYTES)
  redis.call('HSET', clock.prefix .. 'last_error', 'text', text, 'at_ms', now_ms())
end

-- Counts groups that failed since the last group that did not. `others`: whether such a group came before these.
local function note_failures(clock, failed, others)
  local progress = clock.prefix .. 'progress'
  if others then redis.call('HDEL', progress, 'failed_in_a_row') end
  if failed > 0 then redis.call('HINCRBY', progress, 'failed_in_a_row', failed) end
end

-- any status -> failed or filtered, without salvaged parts. Beyond the cap, the oldest group there is dropped. The
-- caller has withdrawn the group.
local function file_for_audit(clock, id, status, err)
  local set, key = clock.prefix .. status, group_key(clock.prefix, id)
  redis.call('HSET', key, 'status', status)
  if err ~= '' then
    redis.call('HSET', key, 'error', err)
    if status == 'failed' then note_error(clock, err) end
  end
  forget_lease(key)
  local arrival, batch, parts = fields(key, 'arrival', 'batch', 'parts')
  if parts then give_parts_up(clock, id, tonumber(parts)) end
  redis.call('ZADD', set, arrival, id)
  redis.call('HINCRBY', clock.prefix .. 'progress', status, 1)
  if batch then redis.call('HINCRBY', clock.prefix .. 'batch:' .. batch, status, 1) end
  -- up to two for the one that was filed, to reach a cap that was lowered
  for _ = 1, math.min(2, redis.call('ZCARD', set) - clock.audit) do
    local oldest = unpack(redis.call('ZPOPMIN', set))
    drop_group(clock, oldest, status)
  end
end

-- any status -> completed or aborted, and into the version index. The caller has withdrawn the group.
local function file_result(clock, id, status, oldest, arrival)
  redis.call('HSET', group_key(clock.prefix, id), 'status', status)
  redis.call('ZADD', clock.prefix .. status, result_score(clock, id, status, oldest, arrival), id)
  redis.call('ZADD', clock.prefix .. 'by_version', version_score(oldest, arrival), id)
end

-- any status -> expired, or dropped where the task drops what expires; returns how many were filed. `scored` alternates
-- arrivals and ids. The caller has withdrawn the groups and reset their stale samples.
-- A group that was trained before is dropped: its prompt has had its turn.
local function file_expired(clock, scored)
  local filed = {}
  redis.call('HINCRBY', clock.prefix .. 'progress', 'expired', #scored / 2)
  for i = 1, #scored, 2 do
    local arrival, id = unpack(scored, i, i + 1)
    local key = group_key(clock.prefix, id)
    if redis.call('HEXISTS', key, 'uses') == 1 then
      drop_group(clock, id, 'reused')
    elseif clock.expired == 'drop' then
      drop_group(clock, id, 'expired')
    else
      local staleness = math.max(0, clock.step - 1 - oldest_now(clock, id))
      redis.call('HSET', key, 'status', 'expired', 'staleness', staleness)
      forget_lease(key)
      redis.call('HDEL', key, 'reward', 'priority')
      append_pair(filed, arrival, id)
    end
  end
  call_many('ZADD', clock.prefix .. 'expired', filed)
  return #filed / 2
end
