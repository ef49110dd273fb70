-- The samples of a group: one letter each, and the oldest version of the tokens of each ('-' without tokens).
--
-- Their frames are fields of its rollout: WHOLE holds all samples, and the field of a sample's index holds a later
-- frame of that sample. A large frame of all samples is not a field, but a separate value, its payload. A payload is
-- named after the lease that made it, and the group's field `payload` holds that name: a payload that no group names is
-- nobody's.
--
-- The payload is a key in the task's slot, whose name is the nonce of the lease, or it is external: in another slot, or
-- in another store. The name of an external payload is `place:id:nonce-suffix`. Functions cannot remove it, so they add
-- its name to the task's garbage, which roles collect. It is alive while its group names it, while the lease with its
-- nonce is held, and while copies of its group share it; a dead name never comes back to life.

local NO_VERSION = '-'
local EVERY_VERSION = '[^,]+'
local FIELDS_PER_CALL = 1000
local NOT_PENDING = '[^' .. SAMPLE.pending .. ']'

local function group_key(prefix, id)
  return prefix .. 'group:' .. id
end

local function rollout_key(prefix, id)
  return prefix .. 'rollout:' .. id
end

local function payload_key(prefix, id, nonce)
  return prefix .. 'payload:' .. id .. ':' .. nonce
end

local AWAY_NAME = '^%a+:(%d+):([^:-]+)%-[^:-]+$'

local function is_away(payload)
  return string.find(payload, ':', 1, true) ~= nil
end

local function shared_key(clock)
  return clock.prefix .. 'shared' -- external payload -> how many groups name it, if several do
end

local function group_fields(clock, id, ...)
  return fields(group_key(clock.prefix, id), ...)
end

local function no_letters(clock)
  return string.rep(SAMPLE.pending, clock.group_size)
end

local function no_versions(clock)
  return string.rep(NO_VERSION .. ',', clock.group_size - 1) .. NO_VERSION
end

local function has_samples(letters)
  return string.find(letters, NOT_PENDING) ~= nil
end

-- The letters and versions that are left without the samples of version `stale` or older, or without all of them when
-- groups expire as a whole; and the indices of the samples that were reset. No sample counts as newer than `cap`.
local function reset_stale(clock, letters, versions, stale, cap)
  local index, reset, kept_letters, kept_versions = 0, {}, {}, {}
  for version in string.gmatch(versions, EVERY_VERSION) do
    local old = version ~= NO_VERSION and math.min(tonumber(version), cap) <= stale
    if old or clock.expiry == 'group' then
      reset[#reset + 1] = index
      kept_letters[#kept_letters + 1] = SAMPLE.pending
      kept_versions[#kept_versions + 1] = NO_VERSION
    else
      kept_letters[#kept_letters + 1] = string.sub(letters, index + 1, index + 1)
      kept_versions[#kept_versions + 1] = version
    end
    index = index + 1
  end
  return table.concat(kept_letters), table.concat(kept_versions, ','), reset
end

-- The oldest version among the samples that a group still has. `versions` may still name samples that were reset.
local function oldest_kept(letters, versions)
  local index, oldest = 0, NO_TOKENS
  for version in string.gmatch(versions or '', EVERY_VERSION) do
    index = index + 1
    if version ~= NO_VERSION and string.sub(letters, index, index) ~= SAMPLE.pending then
      oldest = math.min(oldest, tonumber(version))
    end
  end
  return oldest
end

-- Removes the salvaged parts of a group's samples: the fields of its rollout after the fields of whole samples.
local function drop_parts(clock, id, parts)
  local last = clock.group_size + parts - 1
  for first = clock.group_size, last, FIELDS_PER_CALL do
    local fields_of_parts = {}
    for field = first, math.min(first + FIELDS_PER_CALL - 1, last) do
      fields_of_parts[#fields_of_parts + 1] = field
    end
    redis.call('HDEL', rollout_key(clock.prefix, id), unpack(fields_of_parts))
  end
  redis.call('HDEL', group_key(clock.prefix, id), 'parts', 'part_bytes')
end

-- Removes the salvaged parts of a group that is not sampled again, and forgets the samples that had nothing else.
local function give_parts_up(clock, id, parts)
  local key, rollout = group_key(clock.prefix, id), rollout_key(clock.prefix, id)
  drop_parts(clock, id, parts)
  local payload, letters, versions = fields(key, 'payload', 'letters', 'versions')
  if payload or redis.call('HEXISTS', rollout, WHOLE) == 1 then return end
  local index, kept_letters, kept_versions = 0, {}, {}
  for version in string.gmatch(versions, EVERY_VERSION) do
    local is_kept = redis.call('HEXISTS', rollout, index) == 1
    kept_letters[#kept_letters + 1] = is_kept and string.sub(letters, index + 1, index + 1) or SAMPLE.pending
    kept_versions[#kept_versions + 1] = is_kept and version or NO_VERSION
    index = index + 1
  end
  redis.call('HSET', key, 'letters', table.concat(kept_letters), 'versions', table.concat(kept_versions, ','))
end

-- Notes how many bytes the frames of a group take, and `before` took.
local function note_bytes(clock, id, bytes, before)
  local change = bytes - tonumber(before or '0')
  if change == 0 then return end
  local key = group_key(clock.prefix, id)
  if bytes > 0 then
    redis.call('HSET', key, 'bytes', bytes)
  else
    redis.call('HDEL', key, 'bytes')
  end
  redis.call('HINCRBY', clock.prefix .. 'progress', 'bytes', change)
end

-- Counts the bytes of a group's frames, without parts, which are small and short-lived.
local function measure_frames(clock, id)
  local key, payload_bytes, before = rollout_key(clock.prefix, id), group_fields(clock, id, 'payload_bytes', 'bytes')
  local bytes = tonumber(payload_bytes or '0') + redis.call('HSTRLEN', key, WHOLE)
  for index = 0, clock.group_size - 1 do
    bytes = bytes + redis.call('HSTRLEN', key, index)
  end
  note_bytes(clock, id, bytes, before)
end

-- Whether an external payload may still be read, or named by a group that is put.
local function is_alive(clock, payload)
  local id, nonce = string.match(payload, AWAY_NAME)
  local lease, named = group_fields(clock, id, 'nonce', 'payload')
  return lease == nonce or named == payload or redis.call('HEXISTS', shared_key(clock), payload) == 1
end

-- Gives up an external payload, for one group that no longer names it.
local function discard_payload(clock, payload)
  local shared = shared_key(clock)
  if redis.call('HEXISTS', shared, payload) == 1 then
    if redis.call('HINCRBY', shared, payload, -1) > 0 then return end
    redis.call('HDEL', shared, payload)
  end
  redis.call('SADD', clock.prefix .. 'garbage', payload)
end

-- Removes the frames of a group, which are in its rollout and in `payload`, and `more_keys`.
local function unlink_frames(clock, id, payload, ...)
  local rollout = rollout_key(clock.prefix, id)
  if payload and not is_away(payload) then
    redis.call('UNLINK', rollout, payload_key(clock.prefix, id, payload), ...)
  else
    redis.call('UNLINK', rollout, ...)
    if payload then discard_payload(clock, payload) end
  end
end

-- Removes every frame of a group.
local function drop_frames(clock, id)
  local payload, bytes = group_fields(clock, id, 'payload', 'bytes')
  unlink_frames(clock, id, payload)
  redis.call('HDEL', group_key(clock.prefix, id), 'payload', 'payload_bytes')
  note_bytes(clock, id, 0, bytes)
end

-- Wraps the function `run`, whose calls come with payloads that were set in the same transaction. Payloads that a group
-- names after the call last; the others are removed, even if the call is refused. All expire if `run` is never called.
local function with_payloads(run)
  return function(keys, args)
    local is_done, reply = pcall(run, keys, args)
    local prefix = task_prefix(keys[1])
    for i = 2, #keys do
      local id, nonce = string.match(keys[i], ':payload:(%d+):([^:]+)$')
      local is_named = id and redis.call('HGET', group_key(prefix, id), 'payload') == nonce
      if id then redis.call(is_named and 'PERSIST' or 'UNLINK', keys[i]) end
    end
    if not is_done then error({ err = reply }, 0) end -- pcall has turned the error into a string
    return reply
  end
end

-- Removes the frame of the whole group when each sample that is left has a later frame.
local function drop_whole_if_unused(clock, id, letters)
  local key = rollout_key(clock.prefix, id)
  local payload = group_fields(clock, id, 'payload')
  if not payload and redis.call('HEXISTS', key, WHOLE) == 0 then return end
  for index = 0, #letters - 1 do
    local is_pending = string.sub(letters, index + 1, index + 1) == SAMPLE.pending
    if not is_pending and redis.call('HEXISTS', key, index) == 0 then return end
  end
  redis.call('HDEL', key, WHOLE)
  if payload then
    if is_away(payload) then
      discard_payload(clock, payload)
    else
      redis.call('UNLINK', payload_key(clock.prefix, id, payload))
    end
    redis.call('HDEL', group_key(clock.prefix, id), 'payload', 'payload_bytes')
  end
end

-- Removes the frames of the samples `reset`, which `letters` no longer has.
local function drop_samples(clock, id, letters, reset)
  if not has_samples(letters) then
    drop_frames(clock, id)
  elseif #reset > 0 then
    redis.call('HDEL', rollout_key(clock.prefix, id), unpack(reset))
    drop_whole_if_unused(clock, id, letters)
    measure_frames(clock, id)
  end
end

-- Whether samples may count as older than their oldest token, because tokens are masked by age. If so, a group's hash
-- has `token_versions` too: the versions of the oldest tokens themselves.
local function counts_masked(clock)
  return clock.token_shift ~= 0
end

-- The newest version that tokens of an epoch count as: for a dead epoch, its floor.
local function newest_of(clock, epoch)
  return level_of(clock.floors, epoch) or NO_TOKENS
end

-- The newest version that a group may count as by these floors, if its versions were counted in epoch `counted_in`.
-- The stored versions stay as they were counted; code that compares them applies this cap.
local function cap_by(clock, counted_in, floors)
  counted_in = tonumber(counted_in or '') -- not a number only if changed by hand
  local newest = counted_in and level_of(floors, counted_in)
  return newest and newest + clock.token_shift or NO_TOKENS
end

local function cap_of(clock, counted_in)
  return cap_by(clock, counted_in, clock.floors)
end

local function capped(version, cap)
  version = tonumber(version) or NO_TOKENS -- missing only if a group was changed by hand
  return version == NO_TOKENS and version or math.min(version, cap)
end

-- The version that a group counts as in the live epoch.
local function oldest_now(clock, id)
  local oldest, counted_in = group_fields(clock, id, 'oldest', 'counted_in')
  return capped(oldest, cap_of(clock, counted_in))
end

-- The version of a group's oldest token by these floors of dead epochs.
local function oldest_token(clock, id, floors)
  local oldest, letters, token_versions, counted_in =
    group_fields(clock, id, 'oldest', 'letters', 'token_versions', 'counted_in')
  local cap = cap_by(clock, counted_in, floors)
  if not token_versions then return capped(oldest, cap) end
  return capped(oldest_kept(letters, token_versions), cap == NO_TOKENS and cap or cap - clock.token_shift)
end

-- The numbers in a list of versions, none above `cap`.
local function cap_versions(versions, cap)
  local found = string.gsub(versions, '%-?%d+', function(version)
    return exact(capped(version, cap))
  end)
  return found
end

-- The fields of a group's hash (flat) with its versions as they count in the live epoch, for display, archives and
-- copies of the buffer. The versions of a batch stay as they were when it was claimed.
local function fields_as_counted(clock, id)
  local found, at = redis.call('HGETALL', group_key(clock.prefix, id)), {}
  for i = 1, #found, 2 do
    at[found[i]] = i + 1
  end
  local function cap_all(name, cap)
    if at[name] then found[at[name]] = cap_versions(found[at[name]], cap) end
  end
  local status, cap = found[at.status], cap_of(clock, found[at.counted_in])
  local is_counted_anew = status == 'completed' or status == 'aborted' or status == 'cooling'
  if cap == NO_TOKENS or not is_counted_anew then return found end
  cap_all('oldest', cap)
  cap_all('versions', cap)
  cap_all('token_versions', cap - clock.token_shift)
  found[at.counted_in] = exact(clock.epoch)
  return found
end

-- Removes the samples of a group that reset_stale resets, with their payload. Salvaged parts of such a sample stay
-- until no sample is left or the group is put: without a letter, they count for nothing. No sample counts as newer than
-- `cap`.
local function reset_group(clock, id, stale, cap)
  local key = group_key(clock.prefix, id)
  local old_letters, old_versions = fields(key, 'letters', 'versions')
  local letters, versions, reset = reset_stale(clock, old_letters, old_versions, stale, cap)
  drop_samples(clock, id, letters, reset)
  if not has_samples(letters) then redis.call('HDEL', key, 'parts', 'part_bytes') end
  redis.call('HSET', key, 'letters', letters, 'versions', versions)
  redis.call('HDEL', key, 'shaped', 'rows')
end

-- The newest version that tokens of an epoch may still count as. They may count as they are while each version
-- published since the rewind has had the same weights as in that epoch.
local function hoped_of(clock, epoch)
  local newest = newest_of(clock, epoch)
  return newest == clock.version and NO_TOKENS or newest
end

-- Removes those samples of a group under way that count as version `stale` or older: while it waits to be sampled,
-- nothing else checks them. Returns the oldest version that it keeps. Groups of an evaluation are never too old.
local function age_group(clock, id, stale)
  local letters, versions, counted_in = group_fields(clock, id, 'letters', 'versions', 'counted_in')
  local epoch = tonumber(counted_in or '') -- not a number only if changed by hand
  local cap = epoch and hoped_of(clock, epoch) + clock.token_shift or NO_TOKENS
  local oldest = capped(oldest_kept(letters, versions), cap)
  if clock.kind ~= 'train' or oldest > stale then return oldest end
  reset_group(clock, id, stale, cap)
  letters, versions = group_fields(clock, id, 'letters', 'versions')
  return capped(oldest_kept(letters, versions), cap)
end
