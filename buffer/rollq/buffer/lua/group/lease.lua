-- Leases the best pending groups to one worker until a deadline.
-- Moves: pending -> running
-- KEYS: clock
-- ARGV: incarnation, worker, nonce, epoch, version, want, suspects_held, idle
--   epoch, version: of the worker's weights   suspects_held: how many suspects it runs   idle: 1 when it runs no group
-- Returns: drain 0|1, then per group: id, attempt, tries, step, evaluation, suspect, alone, when it was admitted and
--   when it was leased (ms), letters, prompt, must_finish 0|1, the list index, frame, ... of the samples that earlier
--   attempts left, how many parts of samples they salvaged (from index group_size on, the list holds those), the name
--   of the payload that they left, or '', the mean length of earlier answers to the prompt, or '', and the row of the
--   prompt, or ''
-- Caller: Leasing._lease; workers
-- Repeat: with the same nonce returns the same groups. After the lease has run out, it may lease groups that nobody
--   works on: the worker did not confirm them by `renew`, so their end is not counted as a death
--
-- A suspect is a group that a worker died with. A worker holds at most as many suspects at a time as the square root of
-- their number: with one killer among n, that many share its next death, and with none, all are back after that many
-- turns. On its last try a suspect runs alone, so that only its own death can quarantine it. Any idle worker takes it;
-- of the busy ones, one at a time is asked to drain for it.
local DRAIN_LEASES = 10 -- leases that a drain may take before another worker is asked

local MOST_WORKER_BYTES = 64 -- of a worker's name in a history

local SUSPECTS_PASSED = 1000 -- at most, on the way to groups that are not suspects

local LOOKED_AHEAD = 64 -- groups, for those with the longest answers

-- A lease in the history of its groups: from (ms), version of the worker's weights, worker.
local function describe_lease(now, version, worker)
  worker = string.gsub(string.sub(worker, 1, MOST_WORKER_BYTES), '%c', '?')
  return exact(now) .. ' ' .. exact(version) .. ' ' .. worker
end

-- The newest version that counts as too old to keep. A group that is leased now, for weights of `version`, keeps only
-- newer samples, so that its next batch finds it young enough. Samples that would be no younger if they were made again
-- are kept.
local function too_old_to_keep(clock, version)
  local step, manifest = clock.step, manifest_key(clock, clock.step)
  if has_batch(manifest) and not open_target(manifest) then step = step + 1 end
  return math.min(stale_version(clock, step), version - 1)
end

-- Marks samples that were left out when the group ended with its batch, or that had failed, to be made now.
local function make_left_out(key)
  local letters, has_left_out = fields(key, 'letters', 'left_out')
  if not has_left_out then return end
  redis.call('HSET', key, 'letters', (string.gsub(letters, SAMPLE.failed, SAMPLE.pending)))
  redis.call('HDEL', key, 'left_out')
end

local function grant(clock, id, request, alone)
  local key = group_key(clock.prefix, id)
  local attempt, admitted_ms = fields(key, 'attempt', 'admitted_ms')
  if attempt == '0' then
    request.first_leases = request.first_leases + 1
    request.queued_ms = request.queued_ms + math.max(0, request.now - tonumber(admitted_ms))
  end
  make_left_out(key)
  local kept = age_group(clock, id, request.too_old)
  redis.call('ZADD', clock.prefix .. 'generating', math.min(request.hoped_version, kept), id)
  redis.call('ZREM', clock.prefix .. 'pending', id)
  redis.call('ZREM', clock.prefix .. 'suspects', id)
  redis.call('ZADD', clock.prefix .. 'running', request.now + clock.lease_ms, id)
  redis.call('HINCRBY', key, 'attempt', 1)
  redis.call('HINCRBY', key, 'tries', 1)
  -- stylua: ignore
  redis.call('HSET', key, 'status', 'running', 'worker', request.worker, 'nonce', request.nonce, 'alone', alone,
    'leased_ms', request.now, 'leased', request.leased)
end

-- The groups that an earlier call with this nonce granted and that still have this nonce; nil without such a call.
local function granted_before(clock, nonce)
  local granted = redis.call('GET', clock.prefix .. 'grant:' .. nonce)
  if not granted then return nil end
  local ids = {}
  for _, id in ipairs(split(granted)) do
    if redis.call('HGET', group_key(clock.prefix, id), 'nonce') == nonce then ids[#ids + 1] = id end
  end
  return ids
end

-- Whether a busy worker is to drain for the suspect `id`: it is, when no other worker was asked lately.
local function reserve(clock, id, request)
  local reserved_by, until_ms = group_fields(clock, id, 'reserved_by', 'reserved_until_ms')
  local longest_ms = DRAIN_LEASES * clock.lease_ms
  local is_reserved = reserved_by and reserved_by ~= request.worker and is_ahead(until_ms, longest_ms, request.now)
  if is_reserved then return false end
  -- stylua: ignore
  redis.call('HSET', group_key(clock.prefix, id), 'reserved_by', request.worker,
    'reserved_until_ms', request.now + longest_ms)
  return true
end

-- The suspects that the worker may take now: ids, alone 0|1, and whether it is to drain instead.
local function pick_suspects(clock, request, suspect_count)
  local suspects = clock.prefix .. 'suspects'
  local alone_from = lone_after(clock)
  if request.suspects_held == 0 then
    local last_try = unpack(redis.call('ZRANGEBYSCORE', suspects, alone_from, '+inf', 'LIMIT', 0, 1))
    if last_try and request.idle then return { last_try }, 1, false end
    if last_try and reserve(clock, last_try, request) then return {}, 0, true end
  end
  local most = math.ceil(math.sqrt(suspect_count + request.suspects_held))
  local share = math.min(request.want, most - request.suspects_held)
  if share <= 0 then return {}, 0, false end
  return redis.call('ZRANGEBYSCORE', suspects, '-inf', alone_from - 1, 'LIMIT', 0, share), 0, false
end

-- The groups of `scored`, ids and scores in order, with the longest answers first within a step: a long answer that
-- begins last ends alone. Groups with an unknown length keep their place before shorter groups.
local function longest_first(clock, scored)
  local ids, steps, lengths, places = {}, {}, {}, {}
  for i = 1, #scored, 2 do
    local id = scored[i]
    ids[#ids + 1] = id
    steps[id], places[id] = math.floor(tonumber(scored[i + 1]) / ARRIVALS), i
    lengths[id] = tonumber(expected_tokens(clock, id)) or math.huge
  end
  table.sort(ids, function(a, b)
    if steps[a] ~= steps[b] then return steps[a] < steps[b] end
    if lengths[a] ~= lengths[b] then return lengths[a] > lengths[b] end
    return places[a] < places[b]
  end)
  return ids
end

-- The best pending groups for weights that serve scores up to `beyond`, and some more.
local function find_best(clock, beyond, most)
  local pending = clock.prefix .. 'pending'
  if clock.prompt_stats ~= 1 or clock.kind == 'eval' then
    return redis.call('ZRANGEBYSCORE', pending, '-inf', beyond, 'LIMIT', 0, most)
  end
  local scored = redis.call('ZRANGEBYSCORE', pending, '-inf', beyond, 'WITHSCORES', 'LIMIT', 0, most + LOOKED_AHEAD)
  return longest_first(clock, scored)
end

-- Grants the best pending groups that are not suspects, until `ids` has `want` of them.
local function grant_best(clock, ids, request, suspect_count)
  if #ids >= request.want then return end
  -- groups for a step at which old weights would be too old wait for a worker that has swapped; a worker with the live
  -- weights takes any group, since no worker has better weights
  local beyond = '+inf'
  if request.version < clock.version then
    beyond = '(' .. exact(pending_score(request.version + clock.threshold + 1, 0, 0))
  end
  local suspects = clock.prefix .. 'suspects'
  local most = request.want + math.min(suspect_count, SUSPECTS_PASSED)
  for _, id in ipairs(find_best(clock, beyond, most)) do
    if #ids >= request.want then break end
    if suspect_count == 0 or not redis.call('ZSCORE', suspects, id) then
      grant(clock, id, request, 0)
      ids[#ids + 1] = id
    end
  end
end

-- The ids of the groups that were granted, and whether the worker is to drain instead.
local function grant_groups(clock, request)
  local suspect_count = redis.call('ZCARD', clock.prefix .. 'suspects')
  local ids, alone, drain = {}, 0, false
  if suspect_count > 0 then
    ids, alone, drain = pick_suspects(clock, request, suspect_count)
    for _, id in ipairs(ids) do
      grant(clock, id, request, alone)
    end
  end
  if alone == 0 and not drain then grant_best(clock, ids, request, suspect_count) end
  if request.first_leases > 0 then
    redis.call('HINCRBY', clock.prefix .. 'progress', 'leased', request.first_leases)
    redis.call('HINCRBY', clock.prefix .. 'progress', 'queued_ms', request.queued_ms)
  end
  redis.call('SET', clock.prefix .. 'grant:' .. request.nonce, table.concat(ids, ','), 'PX', clock.lease_ms)
  return ids, drain
end

local function describe_all(clock, ids)
  local reply = { 0 }
  for _, id in ipairs(ids) do
    reply[#reply + 1] = describe_lease_of(clock, id)
  end
  return reply
end

local function lease(keys, args)
  local incarnation, worker, nonce, epoch, version, want, suspects_held, idle = unpack(args)
  check_given(worker, nonce)
  check_whole(epoch, version)
  check_counts(want, suspects_held)
  check_choice(idle, '0', '1')
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local granted = granted_before(clock, nonce)
  if granted then return describe_all(clock, granted) end
  local runs = clock.control == 'run' or clock.control == 'done'
  if not runs or clock.sleep or clock.version < 0 then return { 0 } end
  -- an evaluation measures one version: workers with another version take no part
  if clock.kind == 'eval' and clock.pin ~= epoch .. ':' .. version then return { 0 } end
  local hoped_version = math.min(tonumber(version), hoped_of(clock, tonumber(epoch)))
  version = math.min(tonumber(version), newest_of(clock, tonumber(epoch)))
  if clock.kind == 'train' and version <= stale_version(clock, clock.step) then
    return fail('STALE_WORKER', 'weights of version %s would be too old at step %s', version, clock.step)
  end
  local now = now_ms()
  local ids, drain = grant_groups(clock, {
    worker = worker,
    leased = describe_lease(now, version, worker),
    nonce = nonce,
    version = version,
    hoped_version = hoped_version,
    too_old = too_old_to_keep(clock, version),
    want = tonumber(want),
    suspects_held = tonumber(suspects_held),
    idle = idle == '1',
    now = now,
    first_leases = 0,
    queued_ms = 0, -- since they were admitted
  })
  if drain then return { 1 } end
  return describe_all(clock, ids)
end
