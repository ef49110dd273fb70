-- pending -> running: the best pending groups, to one worker, until a deadline.
-- KEYS[1] clock   ARGV incarnation, worker, nonce, epoch and version of its weights, how many, suspects it holds, idle 0|1
-- Returns drain 0|1, then per group: id, attempt, tries, step, evaluation, suspect, alone, letters, prompt, must finish 0|1, and the
-- list index, frame, ... of the samples that earlier attempts left.
-- Caller: worker.   A repeat with the same nonce returns the same groups.
--
-- Suspects are groups that a worker died with. A worker holds no more of them at a time than the square root of how many
-- there are: if there is a killer among n, so many share its next death, and if there is none, so many turns bring all of
-- them back. On its last try a suspect runs alone, so that only its own death can quarantine it: whichever worker is idle
-- takes it, and of the busy ones, one at a time is told to drain for it.
local DRAIN_LEASES = 10 -- how long a drain may take before another worker is asked, in leases

local function grant(clock, id, worker, version, nonce, deadline, alone)
  local key = group_key(clock.prefix, id)
  local kept = redis.call('HMGET', key, 'letters', 'versions')
  version = math.min(version, oldest_kept(kept[1], kept[2]))
  redis.call('ZADD', clock.prefix .. 'generating', version, id)
  redis.call('ZREM', clock.prefix .. 'pending', id)
  redis.call('ZREM', clock.prefix .. 'suspects', id)
  redis.call('ZADD', clock.prefix .. 'running', deadline, id)
  redis.call('HINCRBY', key, 'attempt', 1)
  redis.call('HINCRBY', key, 'tries', 1)
  redis.call('HSET', key, 'status', 'running', 'worker', worker, 'nonce', nonce, 'alone', alone)
end

local function describe(clock, id)
  local key = group_key(clock.prefix, id)
  local group = redis.call('HMGET', key, 'attempt', 'tries', 'step', 'eval', 'deaths', 'alone', 'letters', 'prompt', 'interruptions')
  local kept = {}
  if string.find(group[7], '[^p]') then kept = redis.call('HGETALL', rollout_key(clock.prefix, id)) end
  return { tonumber(id), tonumber(group[1]), tonumber(group[2]), tonumber(group[3]), tonumber(group[4]),
    tonumber(group[5]) > 0 and 1 or 0, tonumber(group[6]), group[7], group[8],
    tonumber(group[9] or '0') >= clock.interruptions and 1 or 0, kept }
end

-- The suspects that may go out now, as a list of ids, alone 0|1, drain 0|1.
local function pick_suspects(clock, worker, held, idle, want, now)
  local suspects = clock.prefix .. 'suspects'
  local last = redis.call('ZRANGEBYSCORE', suspects, clock.max_deaths - 1, '+inf', 'LIMIT', 0, 1)[1]
  if last and held == 0 then
    local key = group_key(clock.prefix, last)
    if idle == 1 then return { last }, 1, 0 end
    local reserved = redis.call('HMGET', key, 'reserved_by', 'reserved_until_ms')
    if not reserved[1] or reserved[1] == worker or tonumber(reserved[2]) < now then
      redis.call('HSET', key, 'reserved_by', worker, 'reserved_until_ms', now + DRAIN_LEASES * clock.lease_ms)
      return {}, 0, 1
    end
  end
  local share = math.min(want, math.ceil(math.sqrt(redis.call('ZCARD', suspects) + held)) - held)
  if share <= 0 then return {}, 0, 0 end
  return redis.call('ZRANGEBYSCORE', suspects, '-inf', clock.max_deaths - 2, 'LIMIT', 0, share), 0, 0
end

local function lease(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local worker, nonce = args[2], args[3]
  local reply = { 0 }
  local granted = clock.prefix .. 'grant:' .. nonce
  local before = redis.call('GET', granted)
  if before then
    for id in string.gmatch(before, '[^,]+') do
      if redis.call('HGET', group_key(clock.prefix, id), 'nonce') == nonce then reply[#reply + 1] = describe(clock, id) end
    end
    return reply
  end
  if clock.sleep or (clock.control ~= 'run' and clock.control ~= 'done') or clock.version < 0 then return reply end
  -- an evaluation is of one version: whoever serves another has no part in it
  if clock.kind == 'eval' and clock.pin ~= args[4] .. ':' .. args[5] then return reply end
  local epoch, version = tonumber(args[4]), tonumber(args[5])
  if epoch < clock.epoch then
    version = math.min(version, tonumber(redis.call('HGET', keys[1], 'floor:' .. epoch) or version))
  end
  if clock.kind == 'train' and version <= stale_version(clock, clock.step) then
    return fail('STALE_WORKER', 'weights of version ' .. version .. ' would be too old at step ' .. clock.step)
  end

  local want, now = tonumber(args[6]), now_ms()
  local deadline = now + clock.lease_ms
  local pending, suspects = clock.prefix .. 'pending', clock.prefix .. 'suspects'
  local suspect_count = redis.call('ZCARD', suspects)
  local ids = {}
  if suspect_count > 0 then
    local alone, drain
    ids, alone, drain = pick_suspects(clock, worker, tonumber(args[7]), tonumber(args[8]), want, now)
    if drain == 1 then return { 1 } end
    for _, id in ipairs(ids) do grant(clock, id, worker, version, nonce, deadline, alone) end
    if alone == 1 then want = 1 end
  end
  if #ids < want then
    -- groups for a step at which old weights would be too old wait for a worker that has swapped; who serves the live
    -- ones takes all: nobody could do better now
    local beyond = version < clock.version and '(' .. exact(pending_score(version + clock.threshold + 1, 0, 0)) or '+inf'
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', pending, '-inf', beyond, 'LIMIT', 0, want + suspect_count)) do
      if #ids >= want then break end
      if suspect_count == 0 or not redis.call('ZSCORE', suspects, id) then
        grant(clock, id, worker, version, nonce, deadline, 0)
        ids[#ids + 1] = id
      end
    end
  end
  if #ids > 0 then redis.call('SET', granted, table.concat(ids, ','), 'PX', clock.lease_ms) end
  for _, id in ipairs(ids) do reply[#reply + 1] = describe(clock, id) end
  return reply
end
