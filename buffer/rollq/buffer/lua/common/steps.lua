-- The batch of a train step: its manifest, and what happens to its groups once it is trained.

local IDS_PER_CALL = 1000

local function manifest_key(clock, step)
  return clock.prefix .. 'manifest:' .. step
end

local function manifest_ids(manifest)
  return split(redis.call('HGET', manifest, 'ids') or '')
end

local function has_batch(manifest)
  return redis.call('HEXISTS', manifest, 'ids') == 1
end

-- The final number of groups in the batch of a manifest that still fills; nil once it is whole, or without a manifest.
local function open_target(manifest)
  return tonumber(redis.call('HGET', manifest, 'open') or '')
end

-- Numbers of a step's claim, valid only in the epoch that set them: the round in which its batch was claimed, how
-- often the step was released before, and the last round that was given up (-1 for none).
local function claim_numbers(clock, manifest)
  local numbered_in, round, releases, given_up = fields(manifest, 'numbered_in', 'round', 'releases', 'given_up')
  if tonumber(numbered_in) ~= clock.epoch then return 0, 0, -1 end
  return tonumber(round or '0'), tonumber(releases or '0'), tonumber(given_up or '-1')
end

-- How many groups wait for the archive if the groups of the oldest step have waited too long; else 0. As many steps may
-- wait for the archive as for a checkpoint: a checkpoint may cover all of them at once, and the claim after it must
-- leave the archiver time.
local function count_unarchived(clock, step)
  if clock.archive ~= 1 then return 0 end
  local leaving = clock.prefix .. 'leaving'
  local _, oldest = unpack(redis.call('ZRANGE', leaving, 0, 0, 'WITHSCORES'))
  local covered = clock.resume == 'fresh' and step - 1 or clock.checkpoint
  if not oldest or covered - oldest < clock.max_uncheckpointed then return 0 end
  return redis.call('ZCARD', leaving)
end

-- Appends the description of each group to a reply, and returns it: id, version of its oldest token, arrival, tries,
-- tokens, reward, the name of its payload ('' when its frame is in its rollout), the nonce of the lease that made it,
-- the rows of its samples, the output of a pipeline (JSON, or ''), how often it was trained before, and how probable
-- its draw was ('' without one). Versions count by these floors of dead epochs.
local function describe_groups(clock, ids, reply, floors, probabilities)
  for place, id in ipairs(ids) do
    local key = group_key(clock.prefix, id)
    local arrival, tries, tokens, reward, payload, nonce, rows, shaped, uses =
      fields(key, 'arrival', 'tries', 'tokens', 'reward', 'payload', 'put_nonce', 'rows', 'shaped', 'uses')
    -- stylua: ignore
    reply[#reply + 1] = {
      tonumber(id), oldest_token(clock, id, floors), tonumber(arrival), tonumber(tries), tonumber(tokens),
      reward, payload or '', nonce or '', rows or '', shaped or '', tonumber(uses or '0'), probabilities[place] or '',
    }
  end
  return reply
end

-- Moves a whole batch from one status set to another, scored by step.
local function move_batch(clock, ids, from, to, step)
  local scored = {}
  for _, id in ipairs(ids) do
    append_pair(scored, step, id)
    redis.call('HSET', group_key(clock.prefix, id), 'status', to)
  end
  call_many('ZREM', clock.prefix .. from, ids)
  call_many('ZADD', clock.prefix .. to, scored)
end

-- claimed|archived -> completed. The caller has withdrawn the group.
local function return_to_completed(clock, id)
  local arrival = group_fields(clock, id, 'arrival')
  file_result(clock, id, 'completed', oldest_now(clock, id), tonumber(arrival))
end

-- The token threshold and the floors of a batch's groups from index `first` (from 0) on, as a line of its manifest's
-- `later`. A batch that has filled over a restart has such lines; groups before the first line use the manifest's own.
local LATER = '(%d+) (%d+) ([^\n]*)'

local function later_line(first, threshold, floors)
  return exact(first) .. ' ' .. exact(threshold) .. ' ' .. floors .. '\n'
end

-- How the groups of a manifest count: a function of a group's place in it (from 1), in rising order, that returns the
-- token threshold and the floors.
local function counting_of(manifest)
  local floors, threshold, later = fields(manifest, 'floors', 'token_threshold', 'later')
  local parts, part = { { 0, threshold or '', floors or '' } }, 1
  for first, later_threshold, later_floors in string.gmatch(later or '', LATER) do
    parts[#parts + 1] = { tonumber(first), later_threshold, later_floors }
  end
  return function(place)
    while parts[part + 1] and parts[part + 1][1] < place do
      part = part + 1
    end
    return parts[part][2], parts[part][3]
  end
end

-- Appends the groups of a manifest after the `known` ones to a reply, and returns it; see `describe_groups`.
local function describe_manifest(clock, manifest, known, reply)
  local ids, counting = manifest_ids(manifest), counting_of(manifest)
  local probabilities = split(redis.call('HGET', manifest, 'probabilities') or '')
  for place = known + 1, #ids do
    local _, floors = counting(place)
    describe_groups(clock, { ids[place] }, reply, floors, { probabilities[place] })
  end
  return reply
end

local file_trained
do
  -- Lets a group that may be trained once more live on as a new group with the same samples, in cooling. The old group
  -- leaves like every trained group, and its field `clone` makes this happen once, however often its step is trained.
  -- Without `keeps_copies`, there is no room for the new group.
  local function clone_for_reuse(clock, id, step, keeps_copies)
    local key, progress = group_key(clock.prefix, id), clock.prefix .. 'progress'
    local uses, clone, payload, bytes = fields(key, 'uses', 'clone', 'payload', 'bytes')
    uses = tonumber(uses or '0') + 1
    local due = step + 1 + clock.cooldown
    if uses >= clock.max_uses or clone or oldest_now(clock, id) <= stale_version(clock, due) then return end
    if not keeps_copies then
      redis.call('HINCRBY', progress, 'not_reused', 1)
      return
    end
    clone = redis.call('HINCRBY', progress, 'admitted', 1)
    redis.call('HINCRBY', progress, 'reused', 1)
    redis.call('COPY', key, group_key(clock.prefix, clone))
    redis.call('HINCRBY', progress, 'bytes', bytes or 0)
    redis.call('COPY', rollout_key(clock.prefix, id), rollout_key(clock.prefix, clone))
    if payload and is_away(payload) then
      local sharers = redis.call('HEXISTS', shared_key(clock), payload) == 1 and 1 or 2
      redis.call('HINCRBY', shared_key(clock), payload, sharers)
    elseif payload then
      redis.call('COPY', payload_key(clock.prefix, id, payload), payload_key(clock.prefix, clone, payload))
    end
    redis.call('HSET', key, 'clone', clone)
    -- stylua: ignore
    redis.call('HSET', group_key(clock.prefix, clone), 'arrival', clone, 'uses', uses, 'status', 'cooling',
      'copy_of', id)
    redis.call('ZADD', clock.prefix .. 'cooling', due, clone)
  end

  -- cooling -> completed, for groups that may be trained again from `step` on; groups that are too old by then are
  -- dropped as `reused`. Groups beyond IDS_PER_CALL wait for the next step.
  local function end_cooling(clock, step)
    local ids = redis.call('ZRANGEBYSCORE', clock.prefix .. 'cooling', '-inf', step, 'LIMIT', 0, IDS_PER_CALL)
    call_many('ZREM', clock.prefix .. 'cooling', ids)
    local stale = {}
    for _, id in ipairs(ids) do
      local oldest, arrival = oldest_now(clock, id), group_fields(clock, id, 'arrival')
      if oldest <= stale_version(clock, step) then
        append_pair(stale, arrival, id)
      else
        file_result(clock, id, 'completed', oldest, tonumber(arrival))
      end
    end
    if #stale > 0 then file_expired(clock, stale) end
  end

  -- archived -> gone, where the run resumes fresh: groups that were kept only for a save of the buffer.
  local function drop_held(clock)
    local held = redis.call('ZRANGE', clock.prefix .. 'archived', 0, IDS_PER_CALL - 1, 'WITHSCORES')
    for i = 1, #held, 2 do
      local id, step = unpack(held, i, i + 1)
      redis.call('ZREM', clock.prefix .. 'archived', id)
      drop_group(clock, id, 'trained', step)
      redis.call('HDEL', manifest_key(clock, step), 'ids')
    end
  end

  -- Where the run resumes fresh, a trainer that saves no checkpoint leaves a manifest for each step: the oldest go.
  local function forget_counters(clock, step)
    local first = clock.first_manifest
    if step - first < IDS_PER_CALL then return end
    redis.call('UNLINK', manifest_key(clock, first))
    write_clock(clock, { first_manifest = first + 1, history = math.max(clock.history, first + 1) })
  end

  -- Notes for the archive how the groups of a batch were trained.
  local function note_trained(clock, manifest, ids, step)
    local claimed_ms, step_groups = fields(manifest, 'claimed_ms', 'step_groups')
    local now, counting = now_ms(), counting_of(manifest)
    for place, id in ipairs(ids) do
      local threshold, floors = counting(place)
      -- stylua: ignore
      redis.call('HSET', group_key(clock.prefix, id), 'trained_step', step, 'position', place - 1, 'batch_groups', #ids,
        'floors', floors, 'token_threshold', threshold, 'claimed_ms', claimed_ms or '', 'committed_ms', now,
        'step_groups', step_groups or '', 'trainer_epoch', clock.epoch)
    end
  end

  -- A trained batch leaves claimed: archived for the checkpoint, or dropped at once where the run resumes fresh.
  function file_trained(clock, manifest, step, keeps_copies)
    local ids = manifest_ids(manifest)
    if clock.max_uses > 1 then
      for _, id in ipairs(ids) do
        clone_for_reuse(clock, id, step, keeps_copies)
      end
    end
    end_cooling(clock, step + 1) -- max_uses may have been more before
    if clock.archive == 1 then note_trained(clock, manifest, ids, step) end
    if clock.resume == 'fresh' and not is_saving(clock, now_ms()) then
      for _, id in ipairs(ids) do
        redis.call('ZREM', clock.prefix .. 'claimed', id)
        drop_group(clock, id, 'trained', step)
      end
      redis.call('HDEL', manifest, 'ids') -- nothing is left that could be served again
      drop_held(clock)
      forget_counters(clock, step)
    else
      move_batch(clock, ids, 'claimed', 'archived', step)
    end
    local progress = clock.prefix .. 'progress'
    redis.call('HINCRBY', progress, 'staleness', fields(manifest, 'staleness') or 0) -- none without a batch
    local consumed = redis.call('HINCRBY', progress, 'consumed', #ids)
    redis.call('HSET', manifest, 'committed', 1, 'consumed', consumed, 'committed_ms', now_ms())
  end
end
