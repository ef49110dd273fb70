-- A trainer takes the run: a new epoch with a nonce, and the weights of its checkpoint as the live version.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, trainer_id, launch_id, nonce, from_step, mode, uri, digest, lease_ms, takeover, seen_epoch,
--   saved_in, process
--   takeover: 1 to replace a trainer whose lease lasts   seen_epoch: the live epoch, as the caller has read it
--   saved_in: the epoch in which the checkpoint was saved, '' when unknown   process: where the trainer runs, JSON
-- Returns: epoch, nonce, from_step, mode
-- Caller: Training._take_run; the trainer, rank 0
-- Repeat: with the live launch, returns its epoch. A launch that was replaced is refused, and so is a copy of this call
--   that arrives after another trainer has taken the run: the epoch is no longer the one that its caller saw
local KEPT_LAUNCHES = 1000

local function refuse_launch(launches, launch_id, live_launch)
  if not redis.call('ZSCORE', launches, launch_id) then return nil end
  return fail('FENCED', 'launch %s was replaced by launch %s', launch_id, live_launch)
end

-- How long the live trainer's lease of `longest_ms` lasts. The deadline moves if the server's clock was set back.
local function lease_left_ms(trainer, deadline_ms, longest_ms, now)
  local left_ms = deadline_ms - now
  if left_ms <= longest_ms then return left_ms end
  redis.call('HSET', trainer, 'deadline_ms', now + longest_ms)
  return longest_ms
end

local function refuse_rival(live_trainer, left_ms)
  return fail(
    'TRAINER_HELD',
    'trainer %s holds the run for another %s s: stop it, or set takeover = true to take the run from it',
    live_trainer,
    math.max(0, math.ceil(left_ms / 1000))
  )
end

-- After a rewind that serves no batch again, other steps may train the groups of the steps that it has undone.
local function refuse_undone(undone, saved_in, from_step)
  local newest = saved_in ~= '' and level_of(undone, tonumber(saved_in))
  if not newest or tonumber(from_step) <= newest then return nil end
  return fail(
    'HISTORY_GONE',
    'the checkpoint of step %s was saved in epoch %s, and a later rewind has undone its steps after %s: resume from a '
      .. 'checkpoint of step %s or before, or from one that was saved since',
    from_step,
    saved_in,
    newest,
    newest
  )
end

-- The first epoch from which all publications are noted: a snapshot lacks those before it was saved.
local function trace(trainer, live_epoch, epoch)
  local traced = redis.call('HGET', trainer, 'traced')
  if tonumber(traced) ~= live_epoch then redis.call('HSET', trainer, 'traced_since', epoch) end
  redis.call('HSET', trainer, 'traced', epoch)
end

-- The versions after `from_step` whose weights a replay is to publish again: 'version:digest,...'.
local function awaited_after(prefix, from_step)
  local awaited, published = {}, redis.call('HGETALL', prefix .. 'published')
  for i = 1, #published, 2 do
    local digest = string.match(published[i + 1], ' (.*)$')
    local is_recorded = redis.call('HGET', prefix .. 'versions', published[i]) == digest
    if tonumber(published[i]) > from_step and #digest == 64 and is_recorded then
      awaited[#awaited + 1] = published[i] .. ':' .. digest
    end
  end
  return table.concat(awaited, ',')
end

-- The weights of the checkpoint become the live weights. Until the replay publishes a later version again, workers may
-- keep its weights, unless the last replay published other weights.
local function publish_checkpoint(prefix, epoch, from_step, mode, uri, digest)
  set_live_weights(prefix, epoch, from_step, uri, digest)
  note_published(prefix, epoch, from_step, digest)
  local differs = redis.call('HGET', prefix .. 'trainer', 'replays') == 'differ'
  local awaited = mode == 'replay' and not differs and awaited_after(prefix, tonumber(from_step)) or ''
  redis.call('HSET', prefix .. 'model', 'awaited', awaited)
end

local function remember_launch(launches, launch_id, epoch)
  redis.call('ZADD', launches, epoch, launch_id)
  redis.call('ZREMRANGEBYRANK', launches, 0, -KEPT_LAUNCHES - 1)
end

local function run_begin_epoch(keys, args)
  -- stylua: ignore
  local incarnation, trainer_id, launch_id, nonce, from_step, mode, uri, digest, lease_ms, takeover, seen_epoch,
    saved_in, process = unpack(args)
  check_given(trainer_id, launch_id, nonce, uri, digest, process)
  if saved_in ~= '' then check_whole(saved_in) end
  check_whole(from_step, seen_epoch)
  check_counts(lease_ms)
  check_choice(takeover, '0', '1')
  check_choice(mode, 'replay', 'return', 'regenerate')
  local prefix, err = read_run(keys[1], incarnation)
  if err then return err end
  local trainer, launches, now = prefix .. 'trainer', prefix .. 'launches', now_ms()
  -- stylua: ignore
  local live_epoch, live_nonce, live_trainer, live_launch, deadline_ms, live_lease_ms, live_from_step, live_mode =
    fields(trainer, 'epoch', 'nonce', 'trainer_id', 'launch_id', 'deadline_ms', 'lease_ms', 'from_step', 'mode')
  if live_launch == launch_id then return { tonumber(live_epoch), live_nonce, tonumber(live_from_step), live_mode } end
  err = refuse_launch(launches, launch_id, live_launch)
  if err then return err end
  local left_ms = lease_left_ms(trainer, tonumber(deadline_ms or '0'), tonumber(live_lease_ms or lease_ms), now)
  local is_held = live_trainer and left_ms > 0 and takeover ~= '1'
  live_epoch = tonumber(live_epoch or '0')
  if is_held or live_epoch ~= tonumber(seen_epoch) then return refuse_rival(live_trainer, left_ms) end
  local undone, covered = fields(trainer, 'undone', 'covered')
  undone = undone or ''
  err = refuse_undone(undone, saved_in, from_step)
  if err then return err end
  if live_launch then remember_launch(launches, live_launch, live_epoch) end
  local epoch = live_epoch + 1
  if mode ~= 'replay' then undone = lower_levels(undone, epoch, tonumber(from_step), tonumber(covered or '0') - 1) end
  -- stylua: ignore
  redis.call('HSET', trainer, 'epoch', epoch, 'nonce', nonce, 'trainer_id', trainer_id, 'launch_id', launch_id,
    'from_step', from_step, 'mode', mode, 'deadline_ms', now + tonumber(lease_ms), 'lease_ms', lease_ms,
    'undone', undone, 'process', process)
  trace(trainer, live_epoch, epoch)
  redis.call('ZREMRANGEBYSCORE', prefix .. 'curves', '(' .. from_step, '+inf')
  redis.call('ZREMRANGEBYSCORE', prefix .. 'evaluations', '(' .. from_step, '+inf')
  publish_checkpoint(prefix, epoch, from_step, mode, uri, digest)
  return { epoch, nonce, tonumber(from_step), mode }
end
