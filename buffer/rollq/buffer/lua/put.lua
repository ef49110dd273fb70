-- running -> completed | aborted | expired | filtered | failed: the one way in which a result enters the buffer. A group
-- of a batch is gathered for it instead of completed, and sent back to pending when it is not finished.
-- KEYS[1] clock   ARGV incarnation, epoch by which versions were counted, then per group:
--   id, attempt, nonce, letters (one per sample), versions (oldest per sample, comma separated, '-' = no tokens),
--   version that the group counts as or '-', its newest version or '-', filtered 0|1, mean reward (0 when none), rewards counted, new tokens, all tokens,
--   milliseconds it took, error, number of frames, samples that passed, tokens of those rewarded, then index, frame of each
-- Returns one word per group: the status it was filed under, dropped, duplicate (this nonce did it already) or refused,
-- or restarted for a group that went back to pending.
-- Caller: worker.   A repeat answers duplicate.
local WINDOW_TIMINGS = 1000
local NEWEST_TRY = 0.25

local function judge_letters(clock, letters, filtered)
  if not string.find(letters, '[^c]') then
    return filtered and 'filtered' or 'completed'
  end
  local _, failed = string.gsub(letters, 'f', '')
  local minimum = clock.min_valid
  if clock.group_size - failed < minimum then return 'failed' end
  if string.find(letters, '[ap]') then return 'aborted' end
  return filtered and 'filtered' or 'completed'
end

-- What becomes of a group that a batch waits for. One of an evaluation must be of its version alone.
local function judge_gathered(clock, status, evaluation, oldest, newest)
  if status == 'failed' or status == 'filtered' then return status end
  local version = evaluation and oldest ~= NO_TOKENS and tonumber(string.match(clock.pin, ':(.*)')) or oldest
  if status ~= 'completed' or oldest ~= version or (evaluation and newest ~= version) then return 'restarted' end
  return 'gathered'
end

-- Sums for people, since they were last taken; and the outcomes that the keep rate is made of.
local function note_window(clock, window, timings, outcomes)
  for name, number in pairs(window) do redis.call('HINCRBYFLOAT', clock.prefix .. 'window', name, number) end
  many('RPUSH', clock.prefix .. 'timings', timings)
  redis.call('LTRIM', clock.prefix .. 'timings', -WINDOW_TIMINGS, -1)
  many('RPUSH', clock.prefix .. 'outcomes', outcomes)
  redis.call('LTRIM', clock.prefix .. 'outcomes', -clock.keep_window, -1)
end

-- What is known of a prompt: "tries,samples,pass rate,mean reward,mean tokens". The averages are over tries, of which the
-- newest weighs a quarter or more: the policy that is asked changes.
local function note_prompt(clock, row, samples, passed, reward, tokens)
  local key = clock.prefix .. 'prompts'
  local known = redis.call('HGET', key, row) or '0,0,0,0,0'
  local tries, total, rate, mean_reward, mean_tokens = string.match(known, '(.*),(.*),(.*),(.*),(.*)')
  tries = tries + 1
  local weight = math.max(1 / tries, NEWEST_TRY)
  local function average(old, new) return old + weight * (new - old) end
  redis.call('HSET', key, row, string.format('%d,%d,%.5g,%.6g,%.6g', tries, total + samples,
    average(rate, passed / samples), average(mean_reward, reward), average(mean_tokens, tokens / samples)))
end

local function put(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  if clock.epoch ~= tonumber(args[2]) then
    return fail('EPOCH', 'the live epoch is ' .. clock.epoch)
  end
  local prefix = clock.prefix
  local stale = stale_version(clock, clock.step)
  local replies, now = {}, now_ms()
  local produced, tokens, reward_sum, reward_count, refused, duplicates = 0, 0, 0, 0, 0, 0
  local left, by_version, filed = {}, {}, { completed = {}, aborted = {}, gathered = {} } -- arguments of `many`
  local window, timings, outcomes = {}, {}, {}
  local at = 3
  while at <= #args do
    local id, attempt, nonce = args[at], args[at + 1], args[at + 2]
    local frames = tonumber(args[at + 14])
    local first_frame = at + 17
    local key = group_key(prefix, id)
    local group = redis.call('HMGET', key, 'attempt', 'nonce', 'put_nonce', 'arrival', 'deaths', 'batch', 'eval', 'row')
    if group[1] ~= attempt or group[2] ~= nonce then
      if group[1] == attempt and group[3] == nonce then
        replies[#replies + 1] = 'duplicate'
        duplicates = duplicates + 1
      else
        replies[#replies + 1] = 'refused'
        refused = refused + 1
      end
    else
      local letters, versions = args[at + 3], args[at + 4]
      local oldest = tonumber(args[at + 5]) or NO_TOKENS
      local evaluation = group[7] == '1'
      local arrival = tonumber(group[4])
      local status = judge_letters(clock, letters, args[at + 7] == '1')
      if status == 'aborted' then redis.call('HINCRBY', key, 'interruptions', 1) end
      if oldest <= stale and status ~= 'failed' and not evaluation then status = 'expired' end
      if group[6] then status = judge_gathered(clock, status, evaluation, oldest, tonumber(args[at + 6]) or NO_TOKENS) end
      left[#left + 1] = id
      if frames > 0 then
        redis.call('HSET', rollout_key(prefix, id), unpack(args, first_frame, first_frame + 2 * frames - 1))
      end
      if status == 'restarted' and evaluation then
        letters, versions, oldest = string.rep('p', clock.group_size), string.rep('-,', clock.group_size - 1) .. '-', NO_TOKENS
        redis.call('UNLINK', rollout_key(prefix, id))
      elseif status == 'expired' or status == 'restarted' then
        local reset
        letters, versions, reset = reset_stale(clock, letters, versions, stale)
        if #reset > 0 then redis.call('HDEL', rollout_key(prefix, id), unpack(reset)) end
      end
      redis.call('HSET', key, 'status', status, 'letters', letters, 'versions', versions, 'oldest', oldest,
        'newest', args[at + 6], 'reward', args[at + 8], 'tokens', args[at + 11], 'generate_ms', args[at + 12],
        'put_ms', now, 'put_nonce', nonce, 'deaths', (status == 'completed' or status == 'gathered') and 0 or group[5])
      redis.call('HDEL', key, 'nonce', 'worker', 'alone')
      if status == 'restarted' then
        redis.call('HSET', key, 'tries', 0)
        make_pending(clock, id, tonumber(group[5]))
        replies[#replies + 1] = status
      elseif status == 'expired' then
        replies[#replies + 1] = file_expired(clock, { arrival, id }) > 0 and 'expired' or 'dropped'
      elseif status == 'gathered' then
        filed.gathered[#filed.gathered + 1], filed.gathered[#filed.gathered + 2] = arrival, id
        redis.call('HINCRBY', prefix .. 'batch:' .. group[6], 'gathered', 1)
        replies[#replies + 1] = status
      elseif status == 'failed' or status == 'filtered' then
        file_for_audit(clock, id, status, args[at + 13])
        replies[#replies + 1] = status
      else
        local scored = filed[status]
        scored[#scored + 1], scored[#scored + 2] = result_score(clock, oldest, arrival), id
        by_version[#by_version + 1], by_version[#by_version + 2] = version_score(oldest, arrival), id
        replies[#replies + 1] = status
      end
      window[status] = (window[status] or 0) + 1
      if status ~= 'aborted' and status ~= 'restarted' then
        timings[#timings + 1] = args[at + 12]
        if status ~= 'expired' and not evaluation then
          local samples = tonumber(args[at + 9])
          if clock.prompt_stats == 1 and group[8] and samples > 0 then
            note_prompt(clock, group[8], samples, tonumber(args[at + 15]), tonumber(args[at + 8]), tonumber(args[at + 16]))
          end
          outcomes[#outcomes + 1] = (status == 'completed' or status == 'gathered') and 1 or 0
        end
      end
      produced = produced + 1
      tokens = tokens + tonumber(args[at + 10])
      if status ~= 'aborted' and status ~= 'restarted' then
        reward_sum = reward_sum + tonumber(args[at + 8]) * tonumber(args[at + 9])
        reward_count = reward_count + tonumber(args[at + 9])
      end
    end
    at = first_frame + 2 * frames
  end
  local progress = prefix .. 'progress'
  if produced > 0 then
    many('ZREM', prefix .. 'running', left)
    many('ZREM', prefix .. 'generating', left)
    for status, scored in pairs(filed) do many('ZADD', prefix .. status, scored) end
    many('ZADD', prefix .. 'by_version', by_version)
    redis.call('HINCRBY', progress, 'produced', produced)
    redis.call('HINCRBY', progress, 'tokens', tokens)
    redis.call('HINCRBYFLOAT', progress, 'reward_sum', reward_sum)
    redis.call('HINCRBY', progress, 'reward_count', reward_count)
    window.tokens, window.reward_sum, window.reward_count = tokens, reward_sum, reward_count
    note_window(clock, window, timings, outcomes)
    redis.call('PUBLISH', clock.events, window.completed == produced and 'completed' or 'put')
  end
  if refused > 0 then redis.call('HINCRBY', progress, 'refused', refused) end
  if duplicates > 0 then redis.call('HINCRBY', progress, 'duplicates', duplicates) end
  return replies
end
