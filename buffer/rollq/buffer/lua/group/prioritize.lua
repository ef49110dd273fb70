-- Changes the priorities of groups, for the draws of later steps.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, calls, then per group: id, priority
--   calls: how many such calls there were before, as the caller has read it
--   priority: of the group, or of the copy of it that may be trained again
-- Returns: how many of the groups may be trained as they are; -1, and changes nothing, after another call
-- Caller: Claiming._prioritize; the trainer, any rank
-- Repeat: finds that there was another call
local FIRST_GROUP = 5
local GROUP_ARGS = 2

-- The group that lives on for `id`: itself, or the copy that was made when it was trained; and its status.
local function living(clock, id)
  local status, clone = group_fields(clock, id, 'status', 'clone')
  while clone and (is_gone(status) or status == 'archived') do
    id = clone
    status, clone = group_fields(clock, id, 'status', 'clone')
  end
  return id, status
end

-- Returns whether the group may be trained.
local function prioritize_group(clock, id, priority)
  local living_id, status = living(clock, id)
  if is_gone(status) or status == 'archived' then return false end
  local key = group_key(clock.prefix, living_id)
  redis.call('HSET', key, 'priority', priority)
  if status == 'completed' then
    local oldest, arrival = oldest_now(clock, living_id), tonumber((fields(key, 'arrival')))
    local score = result_score(clock, living_id, status, oldest, arrival)
    redis.call('ZADD', clock.prefix .. status, score, living_id)
  end
  return true
end

local function prioritize(keys, args)
  local incarnation, epoch, nonce, calls = unpack(args, 1, FIRST_GROUP - 1)
  check_counts(calls)
  check_rows(args, FIRST_GROUP, GROUP_ARGS)
  for at = FIRST_GROUP, #args, GROUP_ARGS do
    check_counts(args[at])
    check_numbers(args[at + 1])
  end
  local clock, err = read_clock_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  local progress, count = clock.prefix .. 'progress', 0
  if (redis.call('HGET', progress, 'prioritized') or '0') ~= calls then return -1 end
  redis.call('HINCRBY', progress, 'prioritized', 1)
  for at = FIRST_GROUP, #args, GROUP_ARGS do
    local id, priority = unpack(args, at, at + GROUP_ARGS - 1)
    if prioritize_group(clock, id, priority) then count = count + 1 end
  end
  return count
end
