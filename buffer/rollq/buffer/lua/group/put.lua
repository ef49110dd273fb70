-- Files the results of leased groups. No other function files the result of a lease.
-- Moves: running -> completed|aborted|expired|filtered|failed, or dropped; for a group of a batch, running -> gathered
--   when it is finished and back to pending when it is not, or as above without the batch when that is cut off
-- KEYS: clock, payloads
-- ARGV: incarnation, epoch, floors, then per group: id, attempt, nonce, letters, versions, token_versions, oldest,
--   newest, filtered, reward, rewarded, new_tokens, tokens, took_ms, error_text, frame_count, passed,
--   rewarded_tokens, bytes, rows, counted_in, unjudged, failures, samples
--   epoch, floors: by which versions were counted   letters: one per sample
--   versions: the version that each sample counts as, comma separated, '-' without tokens
--   token_versions: likewise, the version of the oldest token of each sample
--   oldest: the version that the group counts as, '-' without tokens   newest: its newest version, or '-'
--   reward: mean over the samples with a reward, else 0   rewarded: how many have a reward   passed: how many passed
--   rewarded_tokens: response tokens of the samples that have a reward   error_text: '' without an error
--   bytes: of the frames and payloads given
--   rows: of the samples, for the trainer (see `rollq.buffer.wire.sample_rows`); '' unless all have ended
--   counted_in: the epoch; or a dead epoch that made all tokens, whose versions are then as they were in that epoch
--   unjudged: indices of samples that are whole and were interrupted while they were judged, comma separated
--   failures: the kind of each sample that failed in this attempt, comma separated
--   samples: the outcome of each (see `rollq.buffer.wire.sample_outcomes`)
--   each group is followed by field, frame of its `frame_count` frames: one of the WHOLE group, which replaces all
--   others, or one of each new sample by index. In place of a large frame of the WHOLE group, the field is BESIDE
--   and the frame '': its payload is one of the keys; or the field AWAY comes with the name of an external payload
-- Returns: one word per group: the status it was filed under, `dropped`, `restarted` when it went back to pending,
--   `duplicate` when this nonce filed it already, or `refused`. Payloads that no group names afterwards are removed,
--   and external ones become garbage
-- Caller: Leasing._put_with; workers
-- Repeat: answers duplicate
local WINDOW_TIMINGS = 1000
local NEWEST_TRY = 0.25
local FIRST_RESULT = 4
local RESULT_ARGS = 24 -- of one group, without its frames
local NO_LETTER = '[^' .. SAMPLE.completed .. SAMPLE.aborted .. SAMPLE.failed .. SAMPLE.pending .. ']'
local NOT_COMPLETED = '[^' .. SAMPLE.completed .. ']'
local HAVE_ALL = { [WHOLE] = true, [BESIDE] = true, [AWAY] = true }
local UNFINISHED = '[' .. SAMPLE.aborted .. SAMPLE.pending .. ']'

local function check_version(version)
  if version ~= NO_VERSION then check_whole(version) end
end

local function check_samples(clock, letters, versions)
  local count, last = 0, nil
  for version in string.gmatch(versions, EVERY_VERSION) do
    if version ~= last then check_version(version) end -- samples have few different versions
    count, last = count + 1, version
  end
  local is_whole_group = #letters == clock.group_size and count == clock.group_size
  if not is_whole_group or string.find(letters, NO_LETTER) then
    refuse_argument(letters .. ' ' .. versions, 'a letter and a version of each sample')
  end
end

local function check_result(clock, result)
  local letters, versions = result.letters, result.versions
  check_given(result.samples) -- the last argument: then all are there
  check_counts(result.counted_in)
  check_choice(result.filtered, '0', '1')
  check_counts(
    result.rewarded,
    result.tokens,
    result.took_ms,
    result.frame_count,
    result.passed,
    result.rewarded_tokens,
    result.bytes
  )
  check_numbers(result.reward, result.new_tokens)
  if not string.find(result.unjudged or '-', '^[%d,]*$') then refuse_argument(result.unjudged, 'indices of samples') end
  for kind in string.gmatch(result.failures, '[^,]+') do
    check_choice(kind, unpack(SAMPLE.failures))
  end
  check_version(result.oldest)
  check_version(result.newest)
  check_samples(clock, letters, versions)
  if counts_masked(clock) then check_samples(clock, letters, result.token_versions) end
end

-- The field, frame, ... of a group.
local function read_frames(clock, args, first, count)
  if first + 2 * count - 1 > #args then refuse_argument(nil, 'a frame of each new sample') end
  local has_all = count == 1 and HAVE_ALL[args[first]]
  for at = first, has_all and 0 or first + 2 * count - 1, 2 do
    check_counts(args[at])
    if tonumber(args[at]) >= clock.group_size then refuse_argument(args[at], 'the index of a sample') end
  end
  return { unpack(args, first, first + 2 * count - 1) }
end

local function check_payload(clock, result)
  local form, payload = unpack(result.frames)
  if form == AWAY then
    local id, nonce = string.match(payload, AWAY_NAME)
    if id ~= result.id or nonce ~= result.nonce then refuse_argument(payload, 'the name of a payload of this lease') end
    return
  end
  local key = payload_key(clock.prefix, result.id, result.nonce)
  if redis.call('EXISTS', key) == 0 then refuse_argument(key, 'a payload that was set') end
end

-- One group of the call, from arguments in the order of `result_args` in Python.
local function read_result(clock, args, at)
  -- stylua: ignore
  local id, attempt, nonce, letters, versions, token_versions, oldest, newest, filtered, reward, rewarded, new_tokens,
    tokens, took_ms, error_text, frame_count, passed, rewarded_tokens, bytes, rows, counted_in, unjudged, failures,
    samples = unpack(args, at, at + RESULT_ARGS - 1)
  local result = {
    id = id,
    attempt = attempt,
    nonce = nonce,
    letters = letters,
    versions = versions,
    token_versions = token_versions,
    oldest = oldest,
    newest = newest,
    filtered = filtered,
    reward = reward,
    rewarded = rewarded,
    new_tokens = new_tokens,
    tokens = tokens,
    took_ms = took_ms,
    error_text = error_text,
    frame_count = frame_count,
    passed = passed,
    rewarded_tokens = rewarded_tokens,
    bytes = bytes,
    rows = rows,
    counted_in = counted_in,
    unjudged = unjudged,
    failures = failures,
    samples = samples,
  }
  check_result(clock, result)
  result.frames = read_frames(clock, args, at + RESULT_ARGS, tonumber(frame_count))
  result.has_payload = result.frames[1] == BESIDE or result.frames[1] == AWAY
  if result.has_payload then check_payload(clock, result) end
  result.key, result.cap = group_key(clock.prefix, id), cap_of(clock, counted_in)
  result.oldest, result.rewarded, result.filtered = tonumber(oldest) or NO_TOKENS, tonumber(rewarded), filtered == '1'
  result.counted = capped(result.oldest, result.cap)
  return result
end

-- All groups of the call. Nothing is written before all of them are found to be sound.
local function read_results(clock, args)
  local results, at = {}, FIRST_RESULT
  while at <= #args do
    local result = read_result(clock, args, at)
    results[#results + 1] = result
    at = at + RESULT_ARGS + #result.frames
  end
  return results
end

-- The stored fields of the group.
local function read_group(key)
  -- stylua: ignore
  local attempt, nonce, put_nonce, arrival, deaths, batch, evaluation, row, letters, parts, bytes, offered = fields(
    key, 'attempt', 'nonce', 'put_nonce', 'arrival', 'deaths', 'batch', 'eval', 'row', 'letters', 'parts', 'bytes',
    'offered')
  return {
    attempt = attempt,
    nonce = nonce,
    put_nonce = put_nonce,
    arrival = tonumber(arrival),
    deaths = deaths,
    batch = batch,
    evaluation = evaluation == '1',
    row = row,
    has_samples = letters and has_samples(letters),
    parts = tonumber(parts or '0'),
    bytes = bytes,
    offered = offered,
  }
end

-- The status by the samples alone.
local function judge_letters(clock, letters, filtered)
  if string.find(letters, NOT_COMPLETED) then
    local _, failed = string.gsub(letters, SAMPLE.failed, '')
    if clock.group_size - failed < clock.min_valid then return 'failed' end
    if string.find(letters, UNFINISHED) then return 'aborted' end
  end
  return filtered and 'filtered' or 'completed'
end

-- The status of a group that a batch waits for. A group of an evaluation must be of its version alone.
local function judge_gathered(clock, group, result, status)
  if status == 'failed' or status == 'filtered' then return status end
  if status ~= 'completed' then
    if group.evaluation or not is_cut_off(clock, group.batch) then return 'restarted' end
    note_left(clock, result.id, group.batch)
    return status
  end
  if group.evaluation and result.counted ~= NO_TOKENS then
    local version = tonumber(string.match(clock.pin, ':(.*)'))
    if result.counted ~= version or tonumber(result.newest) ~= version then return 'restarted' end
  end
  return 'gathered'
end

-- The status that a result is filed under, or `restarted`.
local function classify(clock, group, result, stale)
  local status = judge_letters(clock, result.letters, result.filtered)
  if status == 'aborted' then redis.call('HINCRBY', result.key, 'interruptions', 1) end
  if result.counted <= stale and status ~= 'failed' and not group.evaluation then status = 'expired' end
  if group.batch then return judge_gathered(clock, group, result, status) end
  return status
end

-- Removes the samples that the group may not keep.
local function reset_samples(clock, group, result, status, stale)
  if status == 'restarted' and group.evaluation then
    result.letters, result.versions, result.oldest = no_letters(clock), no_versions(clock), NO_TOKENS
    drop_frames(clock, result.id)
  elseif status == 'expired' or status == 'restarted' then
    local reset
    result.letters, result.versions, reset = reset_stale(clock, result.letters, result.versions, stale, result.cap)
    drop_samples(clock, result.id, result.letters, reset)
  end
end

local function store_group(clock, group, result, status, totals, now)
  local has_finished = status == 'completed' or status == 'gathered'
  if has_finished then totals.outlived = totals.outlived + group.deaths end
  local deaths = has_finished and 0 or group.deaths
  -- stylua: ignore
  redis.call('HSET', result.key, 'status', status, 'letters', result.letters, 'versions', result.versions,
    'oldest', result.oldest, 'newest', result.newest, 'reward', result.reward, 'tokens', result.tokens,
    'generate_ms', result.took_ms, 'put_ms', now, 'put_nonce', result.nonce, 'deaths', deaths,
    'counted_in', result.counted_in, 'rows', result.rows, 'samples', result.samples)
  if result.unjudged == '' then
    redis.call('HDEL', result.key, 'unjudged')
  else
    redis.call('HSET', result.key, 'unjudged', result.unjudged)
  end
  if counts_masked(clock) then redis.call('HSET', result.key, 'token_versions', result.token_versions) end
  forget_lease(result.key)
end

-- Files a group under its status; completed, aborted and gathered groups when the call ends. Returns the word for it.
local function file(clock, group, result, status, totals)
  if status == 'restarted' then
    redis.call('HSET', result.key, 'tries', 0)
    make_pending(clock, result.id, tonumber(group.deaths))
  elseif status == 'expired' then
    return file_expired(clock, { group.arrival, result.id }) > 0 and 'expired' or 'dropped'
  elseif status == 'gathered' then
    append_pair(totals.filed.gathered, group.arrival, result.id)
    redis.call('HINCRBY', batch_key(clock, group.batch), 'gathered', 1)
  elseif status == 'failed' or status == 'filtered' then
    file_for_audit(clock, result.id, status, result.error_text)
  else
    append_pair(totals.filed[status], result_score(clock, result.id, status, result.counted, group.arrival), result.id)
    append_pair(totals.by_version, version_score(result.counted, group.arrival), result.id)
  end
  return status
end

-- Updates the statistics of a prompt: "tries,samples,pass rate,mean reward,mean tokens". The averages are over tries;
-- the newest try weighs a quarter or more, because the policy changes.
local function note_prompt(clock, row, result)
  local prompts = clock.prefix .. 'prompts'
  local known = redis.call('HGET', prompts, row) or '0,0,0,0,0'
  local tries, samples, pass_rate, mean_reward, mean_tokens = unpack(split(known))
  tries = tries + 1
  local weight = math.max(1 / tries, NEWEST_TRY)
  local function average(old, new)
    return old + weight * (new - old)
  end
  -- stylua: ignore
  pass_rate = average(pass_rate, result.passed / result.rewarded)
  mean_reward = average(mean_reward, tonumber(result.reward))
  mean_tokens = average(mean_tokens, result.rewarded_tokens / result.rewarded)
  samples = samples + result.rewarded
  local statistics = string.format('%d,%d,%.5g,%.6g,%.6g', tries, samples, pass_rate, mean_reward, mean_tokens)
  redis.call('HSET', prompts, row, statistics)
end

-- Adds a filed group to the call's totals and to the statistics of its prompt.
local function account(clock, group, result, status, totals)
  totals.window[status] = (totals.window[status] or 0) + 1
  totals.produced = totals.produced + 1
  totals.tokens = totals.tokens + result.new_tokens
  totals.worked_ms = totals.worked_ms + result.took_ms
  for kind in string.gmatch(result.failures, '[^,]+') do
    totals.failures[kind] = (totals.failures[kind] or 0) + 1
  end
  if status == 'aborted' or status == 'restarted' then return end -- it comes back, and counts as an outcome then
  -- failures in a row stop production, so a group that has not failed begins the count again
  totals.failed = status == 'failed' and totals.failed + 1 or 0
  totals.others = totals.others or status ~= 'failed'
  totals.timings[#totals.timings + 1] = result.took_ms
  totals.reward_sum = totals.reward_sum + tonumber(result.reward) * result.rewarded
  totals.reward_count = totals.reward_count + result.rewarded
  -- the keep rate and the statistics say what prompts are worth: age and evaluations do not
  if status == 'expired' or group.evaluation then return end
  local is_known = clock.prompt_stats == 1 and group.row and tonumber(result.id) >= first_of_prompts(clock)
  if is_known and result.rewarded > 0 then note_prompt(clock, group.row, result) end
  totals.outcomes[#totals.outcomes + 1] = (status == 'completed' or status == 'gathered') and 1 or 0
end

-- Appends values to a list, which keeps its newest ones.
local function append_newest(key, values, most)
  if #values > 0 and redis.call('RPUSH', key, unpack(values)) > most then redis.call('LTRIM', key, -most, -1) end
end

-- Writes the sums since take_production, and the outcomes that make the keep rate.
local function note_window(clock, totals)
  local window = totals.window
  window.tokens, window.reward_sum, window.reward_count = totals.tokens, totals.reward_sum, totals.reward_count
  add_to_fields(clock.prefix .. 'window', window)
  append_newest(clock.prefix .. 'timings', totals.timings, WINDOW_TIMINGS)
  append_newest(clock.prefix .. 'outcomes', totals.outcomes, clock.keep_window)
end

local function write_totals(clock, totals)
  local prefix, progress = clock.prefix, clock.prefix .. 'progress'
  if totals.refused > 0 then redis.call('HINCRBY', progress, 'refused', totals.refused) end
  if totals.duplicates > 0 then redis.call('HINCRBY', progress, 'duplicates', totals.duplicates) end
  if totals.produced == 0 then return end
  call_many('ZREM', prefix .. 'running', totals.left)
  call_many('ZREM', prefix .. 'generating', totals.left)
  call_many('ZREM', prefix .. 'offers', totals.offered)
  for status, scored in pairs(totals.filed) do
    call_many('ZADD', prefix .. status, scored)
  end
  call_many('ZADD', prefix .. 'by_version', totals.by_version)
  local additions = {
    produced = totals.produced,
    outlived = totals.outlived > 0 and totals.outlived or nil,
    tokens = totals.tokens,
    worked_ms = totals.worked_ms,
    reward_sum = totals.reward_sum,
    reward_count = totals.reward_count,
  }
  for kind, count in pairs(totals.failures) do
    additions['failed_samples_' .. kind] = count
  end
  add_to_fields(progress, additions)
  note_window(clock, totals)
  note_failures(clock, totals.failed, totals.others)
  wake(clock, totals.window.completed == totals.produced and EVENT.completed or EVENT.put)
end

local function new_totals()
  return {
    produced = 0,
    refused = 0,
    outlived = 0, -- deaths of workers whose groups were finished later
    duplicates = 0,
    tokens = 0,
    worked_ms = 0,
    reward_sum = 0,
    reward_count = 0,
    left = {}, -- ids that leave running
    offered = {}, -- ids of groups that offer samples
    by_version = {}, -- scores and ids
    filed = { completed = {}, aborted = {}, gathered = {} }, -- scores and ids by status
    window = {}, -- groups by status
    failures = {}, -- samples that failed, by kind
    failed = 0, -- groups since the last group that did not fail
    others = false, -- whether there was such a group
    timings = {},
    outcomes = {},
  }
end

-- Files one result; returns the word for it.
local function put_result(clock, group, result, totals, now)
  local stale = stale_version(clock, clock.step)
  local status = classify(clock, group, result, stale)
  totals.left[#totals.left + 1] = result.id
  if group.offered then totals.offered[#totals.offered + 1] = result.id end
  reset_samples(clock, group, result, status, stale)
  if is_cut_off(clock, group.batch) then redis.call('HSET', result.key, 'left_out', 1) end
  store_group(clock, group, result, status, totals, now)
  local word = file(clock, group, result, status, totals)
  account(clock, group, result, status, totals)
  return word
end

-- The word for a result whose lease is no longer the caller's.
local function refuse(clock, group, result, totals)
  local form, payload = unpack(result.frames)
  if form == AWAY and not is_alive(clock, payload) then redis.call('SADD', clock.prefix .. 'garbage', payload) end
  if group.attempt == result.attempt and group.put_nonce == result.nonce then
    totals.duplicates = totals.duplicates + 1
    return 'duplicate'
  end
  totals.refused = totals.refused + 1
  return 'refused'
end

-- Stores the new frames, which replace what was salvaged of the group: `put` gets every sample that has parts. Only a
-- group with samples has frames from before.
local function store_frames(clock, group, result)
  local id, form, frame = result.id, unpack(result.frames)
  local has_all = HAVE_ALL[form]
  if group.parts > 0 then drop_parts(clock, id, group.parts) end
  if has_all and group.has_samples then
    drop_frames(clock, id)
    group.bytes = nil
  end
  if result.has_payload then
    redis.call('HSET', result.key, 'payload', form == AWAY and frame or result.nonce, 'payload_bytes', result.bytes)
  else
    call_many('HSET', rollout_key(clock.prefix, id), result.frames)
  end
  if has_all then
    note_bytes(clock, id, tonumber(result.bytes), group.bytes)
  else
    drop_whole_if_unused(clock, id, result.letters)
    measure_frames(clock, id)
  end
end

local function put(keys, args)
  local incarnation, epoch, floors = unpack(args, 1, FIRST_RESULT - 1)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  if clock.epoch ~= tonumber(epoch) or clock.floors ~= floors then
    return fail('EPOCH', 'the live epoch is %s, and floors are %s', clock.epoch, clock.floors)
  end
  local now, totals = now_ms(), new_totals()
  local replies = {}
  for _, result in ipairs(read_results(clock, args)) do
    local group = read_group(result.key)
    if group.attempt == result.attempt and group.nonce == result.nonce then
      store_frames(clock, group, result)
      replies[#replies + 1] = put_result(clock, group, result, totals, now)
    else
      replies[#replies + 1] = refuse(clock, group, result, totals)
    end
  end
  write_totals(clock, totals)
  return replies
end
