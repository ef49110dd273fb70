-- completed -> claimed: the batch of one step, fixed for ever by its manifest.
-- KEYS[1] clock   ARGV incarnation, epoch, nonce, step, how many, round of the step's plan
-- Returns 'batch', the floors of dead epochs when it was claimed, and per group id, oldest version, arrival, tries,
-- tokens, reward, what a pipeline gave it (JSON); or 'short', how many are ready, how many in
-- generation must be waited for; or 'sweep', 0, 0 when stale groups stand in the way of first-in-first-out
-- order and expire must run first.
-- Caller: trainer, any rank.   A repeat returns the manifest's batch unchanged.
--
-- A batch that a replay serves again keeps the floors of its first claim: its tokens are as old as they were then.
local function live_floors(clock)
  local floors = {}
  for epoch = 0, clock.epoch - 1 do
    local floor = redis.call('HGET', clock.key, 'floor:' .. epoch)
    if floor then floors[#floors + 1] = epoch .. ':' .. floor end
  end
  return table.concat(floors, ',')
end

local function describe_batch(clock, manifest)
  local reply = { 'batch', redis.call('HGET', manifest, 'floors') }
  for _, id in ipairs(manifest_ids(manifest)) do
    local group = redis.call('HMGET', group_key(clock.prefix, id), 'oldest', 'arrival', 'tries', 'tokens', 'reward', 'shaped')
    reply[#reply + 1] = { tonumber(id), tonumber(group[1]), tonumber(group[2]), tonumber(group[3]), tonumber(group[4]), group[5], group[6] or '' }
  end
  return reply
end

-- The first groups of a batch. First in, first out, `old` stale ones at most stand between them while a copy of the buffer is
-- taken: nothing expires then.
local function first_fresh(clock, lowest, want, old)
  local completed, ids = clock.prefix .. 'completed', {}
  if clock.order ~= 'fifo' then return redis.call('ZRANGEBYSCORE', completed, lowest, '+inf', 'LIMIT', 0, want) end
  for _, id in ipairs(redis.call('ZRANGE', completed, 0, want + old - 1)) do
    if #ids < want and tonumber(redis.call('ZSCORE', clock.prefix .. 'by_version', id)) >= tonumber(lowest) then ids[#ids + 1] = id end
  end
  return ids
end

local function claim(keys, args)
  local clock, err = read_clock_as_trainer(keys[1], args[1], args[2], args[3])
  if err then return err end
  if clock.kind == 'eval' then return fail('EVALUATION', 'groups of an evaluation are never trained') end
  local step, want, round = tonumber(args[4]), tonumber(args[5]), tonumber(args[6])
  local manifest = clock.prefix .. 'manifest:' .. step
  if redis.call('HEXISTS', manifest, 'ids') == 1 then
    -- what a rank of an earlier round is about to undo is taken over
    if round > tonumber(redis.call('HGET', manifest, 'round')) then redis.call('HSET', manifest, 'round', round) end
    return describe_batch(clock, manifest)
  end
  if step <= clock.committed then
    return fail('HISTORY_GONE', 'step ' .. step .. ' was committed and its batch is no longer kept; the oldest step that can be replayed is ' .. clock.history + 1)
  end
  if clock.resume ~= 'fresh' and step - clock.checkpoint > clock.max_uncheckpointed then
    return fail('CHECKPOINT_OVERDUE', 'the last checkpoint is of step ' .. clock.checkpoint .. ', and ' .. clock.max_uncheckpointed
      .. ' steps are held for the next one; call checkpoint(), or raise max_uncheckpointed_steps')
  end
  local lowest, passed_over = stale_bound(stale_version(clock, step)), 0
  if clock.order == 'fifo' then
    local old = redis.call('ZCOUNT', clock.prefix .. 'by_version', '-inf', '(' .. lowest)
    if old > 0 and clock.saving_until_ms <= now_ms() then return { 'sweep', 0, 0 } end
    passed_over = old
  end
  local ready, stragglers = readiness(clock, step)
  if ready < want or (stragglers > 0 and want > 0) then return { 'short', ready, stragglers } end
  local ids = {}
  if want > 0 then ids = first_fresh(clock, lowest, want, passed_over) end
  move_batch(clock, ids, 'completed', 'claimed', step)
  many('ZREM', clock.prefix .. 'by_version', ids)
  redis.call('HSET', manifest, 'ids', table.concat(ids, ','), 'floors', live_floors(clock), 'epoch', clock.epoch, 'version',
    clock.version, 'claimed_ms', now_ms(), 'round', round)
  redis.call('HSET', keys[1], 'claimed_step', math.max(clock.claimed_step, step))
  redis.call('PUBLISH', clock.events, 'claim')
  return describe_batch(clock, manifest)
end
