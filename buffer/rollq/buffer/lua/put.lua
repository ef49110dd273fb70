-- running -> completed | aborted | expired | filtered | failed: the one way in which a result enters the buffer.
-- KEYS[1] clock   ARGV incarnation, epoch by which versions were counted, then per group:
--   id, attempt, nonce, letters (one per sample), versions (oldest per sample, comma separated, '-' = no tokens),
--   oldest version or -1, newest version or -1, filtered 0|1, mean reward (0 when none), rewards counted, new tokens, all tokens,
--   milliseconds it took, error, number of frames, then index, frame of each
-- Returns one word per group: the status it was filed under, dropped, duplicate (this nonce did it already) or refused.
-- Caller: worker.   A repeat answers duplicate.
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
  local left, by_version, filed = {}, {}, { completed = {}, aborted = {} } -- arguments of `many`
  local at = 3
  while at <= #args do
    local id, attempt, nonce = args[at], args[at + 1], args[at + 2]
    local frames = tonumber(args[at + 14])
    local first_frame = at + 15
    local key = group_key(prefix, id)
    local group = redis.call('HMGET', key, 'attempt', 'nonce', 'put_nonce', 'arrival', 'deaths')
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
      local oldest = tonumber(args[at + 5])
      if oldest < 0 then oldest = NO_TOKENS end
      local arrival = tonumber(group[4])
      local status = judge_letters(clock, letters, args[at + 7] == '1')
      if oldest <= stale and status ~= 'failed' then status = 'expired' end
      left[#left + 1] = id
      if frames > 0 then
        redis.call('HSET', rollout_key(prefix, id), unpack(args, first_frame, first_frame + 2 * frames - 1))
      end
      if status == 'expired' then
        local reset
        letters, versions, reset = reset_stale(clock, letters, versions, stale)
        if #reset > 0 then redis.call('HDEL', rollout_key(prefix, id), unpack(reset)) end
      end
      redis.call('HSET', key, 'status', status, 'letters', letters, 'versions', versions, 'oldest', oldest,
        'newest', args[at + 6], 'reward', args[at + 8], 'tokens', args[at + 11], 'generate_ms', args[at + 12],
        'put_ms', now, 'put_nonce', nonce, 'deaths', status == 'completed' and 0 or group[5])
      redis.call('HDEL', key, 'nonce', 'worker', 'alone')
      if status == 'expired' then
        replies[#replies + 1] = file_expired(clock, { arrival, id })
      elseif status == 'failed' or status == 'filtered' then
        file_for_audit(clock, id, status, args[at + 13])
        replies[#replies + 1] = status
      else
        local scored = filed[status]
        scored[#scored + 1], scored[#scored + 2] = result_score(clock, oldest, arrival), id
        by_version[#by_version + 1], by_version[#by_version + 2] = version_score(oldest, arrival), id
        replies[#replies + 1] = status
      end
      produced = produced + 1
      tokens = tokens + tonumber(args[at + 10])
      if status ~= 'aborted' then
        reward_sum = reward_sum + tonumber(args[at + 8]) * tonumber(args[at + 9])
        reward_count = reward_count + tonumber(args[at + 9])
      end
    end
    at = first_frame + 2 * frames
  end
  local progress = prefix .. 'progress'
  if produced > 0 then
    many('ZREM', prefix .. 'running', left)
    for status, scored in pairs(filed) do many('ZADD', prefix .. status, scored) end
    many('ZADD', prefix .. 'by_version', by_version)
    redis.call('HINCRBY', progress, 'produced', produced)
    redis.call('HINCRBY', progress, 'tokens', tokens)
    redis.call('HINCRBYFLOAT', progress, 'reward_sum', reward_sum)
    redis.call('HINCRBY', progress, 'reward_count', reward_count)
    redis.call('PUBLISH', clock.events, 'put')
  end
  if refused > 0 then redis.call('HINCRBY', progress, 'refused', refused) end
  if duplicates > 0 then redis.call('HINCRBY', progress, 'duplicates', duplicates) end
  return replies
end
