-- Drops the plans of steps that a checkpoint covers, with the digests of the versions before it, or the plans of steps
-- that are trained again: no trainer may resume from a checkpoint of these steps that an older epoch has saved.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, epoch, nonce, first, last, spared
--   spared: the epoch whose plans stay after a rewind, '' for a checkpoint
-- Returns: 1
-- Caller: Claiming._forget_plans; the trainer, rank 0
-- Repeat: finds nothing; a copy of the call that arrives later finds only plans that it spares
local MOST_STEPS = 1000 -- in a call; callers split longer ranges

local function cover(trainer, step)
  local covered = tonumber(redis.call('HGET', trainer, 'covered') or '0')
  redis.call('HSET', trainer, 'covered', math.max(covered, step))
end

local function undo_from(trainer, epoch, step)
  local undone, covered = fields(trainer, 'undone', 'covered')
  local newest = level_of(undone or '', epoch - 1)
  if newest and newest < step then return end
  redis.call('HSET', trainer, 'undone', lower_levels(undone or '', epoch, step - 1, tonumber(covered or '0') - 1))
end

local function forget_plans(keys, args)
  local incarnation, epoch, nonce, first, last, spared = unpack(args)
  check_whole(first, last)
  if last - first >= MOST_STEPS then refuse_argument(last, 'fewer than ' .. MOST_STEPS .. ' steps after the first') end
  check_given(spared)
  local prefix, err = read_run_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  local covers, trainer = spared == '', prefix .. 'trainer'
  first, last = tonumber(first), tonumber(last)
  if covers then
    cover(trainer, last)
  else
    undo_from(trainer, tonumber(epoch), first)
  end
  for step = first, last do
    local key = plan_key(prefix, step)
    if covers then
      redis.call('HDEL', prefix .. 'versions', step - 1)
      redis.call('HDEL', prefix .. 'published', step - 1)
    end
    if redis.call('HGET', key, 'epoch') ~= spared then redis.call('UNLINK', key) end
  end
  return 1
end
