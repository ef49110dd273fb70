-- Sends interrupted and expired groups back to workers, oldest first, as many as the target leaves room for.
-- Moves: aborted|expired -> pending
-- KEYS: clock
-- ARGV: incarnation, epoch, target, limit, then statuses
--   statuses: in the order in which they are drawn on
-- Returns: how many moved
-- Caller: Admission.recycle; producers
-- Repeat: finds less room
local FIRST_STATUS = 5

-- Without partial rollout, an interrupted sample starts again from the prompt, unless it is whole and was not judged.
local function restart_interrupted(clock, id, key)
  local letters, unjudged = fields(key, 'letters', 'unjudged')
  local is_made, interrupted, kept = {}, {}, {}
  for _, index in ipairs(split(unjudged or '')) do
    is_made[tonumber(index)] = true
  end
  for index = 0, #letters - 1 do
    local letter = string.sub(letters, index + 1, index + 1)
    if letter == SAMPLE.aborted and not is_made[index] then
      interrupted[#interrupted + 1] = index
      letter = SAMPLE.pending
    end
    kept[#kept + 1] = letter
  end
  letters = table.concat(kept)
  drop_samples(clock, id, letters, interrupted)
  redis.call('HSET', key, 'letters', letters)
end

local function recycle_group(clock, id, status)
  local key = group_key(clock.prefix, id)
  withdraw(clock, id, status)
  if clock.partial == 0 then restart_interrupted(clock, id, key) end
  redis.call('HSET', key, 'tries', 0) -- the last try had a result
  make_pending(clock, id, tonumber(redis.call('HGET', key, 'deaths')))
end

local function recycle(keys, args)
  local incarnation, epoch, target, limit = unpack(args, 1, FIRST_STATUS - 1)
  check_whole(epoch, target)
  check_counts(limit)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  if clock.epoch ~= tonumber(epoch) or clock.control ~= 'run' or clock.sleep then return 0 end
  local room = math.min(tonumber(limit), tonumber(target) - scheduled(clock))
  local moved = 0
  for i = FIRST_STATUS, #args do
    if moved >= room then break end
    local status = args[i]
    local ids = redis.call('ZRANGE', clock.prefix .. status, 0, room - moved - 1)
    for _, id in ipairs(ids) do
      recycle_group(clock, id, status)
    end
    moved = moved + #ids
  end
  if moved > 0 then wake(clock, EVENT.admit) end
  return moved
end
