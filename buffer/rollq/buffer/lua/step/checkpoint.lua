-- A checkpoint covers a step and all before it: their batches will not be asked for again.
-- Moves: archived -> gone, or leaving for the archive
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, step, limit
-- Returns: more 0|1: call again
-- Caller: Training.checkpoint; the trainer, rank 0
-- Repeat: finds nothing
--
-- The manifest of `step` stays: a resume from this checkpoint restores its counters.
local function checkpoint(keys, args)
  local incarnation, epoch, nonce, step, limit = unpack(args)
  check_whole(step)
  check_counts(limit)
  local clock, err = read_clock_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  step, limit = tonumber(step), tonumber(limit)
  if step > clock.committed then
    return fail('NOT_CLAIMED', 'step %s is not committed yet; the last committed step is %s', step, clock.committed)
  end
  if step < clock.checkpoint then return 0 end
  if is_saving(clock, now_ms()) then -- nothing is dropped before the next checkpoint
    write_clock(clock, { checkpoint = step })
    return 0
  end
  local archived = clock.prefix .. 'archived'
  local ids = redis.call('ZRANGEBYSCORE', archived, '-inf', step, 'LIMIT', 0, limit)
  local first = math.min(step, clock.first_manifest + limit)
  for old = clock.first_manifest, first - 1 do
    redis.call('UNLINK', manifest_key(clock, old))
  end
  write_clock(clock, { checkpoint = step, history = step, first_manifest = math.max(clock.first_manifest, first) })
  for _, id in ipairs(ids) do
    local trained_at = redis.call('ZSCORE', archived, id)
    redis.call('ZREM', archived, id)
    drop_group(clock, id, 'trained', trained_at)
  end
  return (#ids == limit or first < step) and 1 or 0
end
