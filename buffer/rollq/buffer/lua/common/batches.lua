-- Batches that are gathered as a whole, for a coordinator or an evaluation.

local BATCHES_KEPT = 200 -- of those that are over

local function batch_key(clock, handle)
  return clock.prefix .. 'batch:' .. handle
end

local function batch_ids(clock, handle)
  return redis.call('LRANGE', batch_key(clock, handle) .. ':groups', 0, -1)
end

local function is_unfinished(status)
  return status == 'pending' or status == 'running'
end

-- pending|running|gathered -> aborted: an unfinished group leaves its batch for the pool of interrupted groups, with
-- the samples that it has.
local function leave_batch(clock, id)
  local key = group_key(clock.prefix, id)
  local status, arrival, letters, versions, counted_in =
    fields(key, 'status', 'arrival', 'letters', 'versions', 'counted_in')
  redis.call('HDEL', key, 'batch')
  if status == 'running' then note_lease(key, 'batch_ended', exact(now_ms())) end
  forget_lease(key)
  if not is_unfinished(status) and status ~= 'gathered' then return end
  withdraw(clock, id, status)
  local oldest = oldest_kept(letters, versions)
  redis.call('HSET', key, 'oldest', oldest)
  redis.call('HSETNX', key, 'versions', no_versions(clock))
  file_result(clock, id, 'aborted', capped(oldest, cap_of(clock, counted_in)), tonumber(arrival))
end

-- Whether a batch waits only for groups that workers have finished; `handle` may be nil or false.
local function is_cut_off(clock, handle)
  return handle and redis.call('HGET', batch_key(clock, handle), 'cut_off') == '1'
end

-- Notes that an unfinished group leaves a batch that is cut off: `abort_batch` still drops it.
local function note_left(clock, id, handle)
  redis.call('HDEL', group_key(clock.prefix, id), 'batch')
  redis.call('HSET', group_key(clock.prefix, id), 'left_batch', handle)
  redis.call('HINCRBY', batch_key(clock, handle), 'left', 1)
end

-- Ends a batch whose groups have left it. Its result stays readable until BATCHES_KEPT more have ended.
local function end_batch(clock, handle, state, result)
  local batch, over = batch_key(clock, handle), clock.prefix .. 'batches_over'
  redis.call('UNLINK', batch .. ':groups')
  redis.call('HSET', batch, 'state', state, 'result', result)
  if redis.call('HGET', batch, 'type') == 'eval' then
    write_clock(clock, { open_evaluations = clock.open_evaluations - 1 })
  end
  if redis.call('RPUSH', over, handle) > BATCHES_KEPT then
    local oldest, handles = redis.call('LPOP', over), clock.prefix .. 'batches'
    local id = redis.call('HGET', batch_key(clock, oldest), 'id')
    if id and redis.call('HGET', handles, id) == oldest then redis.call('HDEL', handles, id) end
    redis.call('UNLINK', batch_key(clock, oldest))
  end
  wake(clock, EVENT.batch)
end

-- Ends the caller's hold of a batch that it finalizes. Returns true; false, the state and the kept result without one.
local function disown_batch(clock, handle, nonce)
  local batch = batch_key(clock, handle)
  local state, owner, result = fields(batch, 'state', 'owner', 'result')
  if state ~= 'finalizing' or owner ~= nonce then return false, state or 'gone', result or '' end
  redis.call('HDEL', batch, 'owner', 'owned_until_ms')
  return true
end
