-- Takes the batch of a step. Its manifest fixes it from then on.
-- Moves: completed -> claimed
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, step, want, claim_round, releases, step_groups
--   want: how many groups   claim_round, releases: of the step's plan   step_groups: of the batch, of all its tasks
-- Returns: `batch`, the floors of dead epochs when it was claimed, its round, its releases, from which staleness on its
--   tokens are masked, and its groups (see `describe_groups`); or `short`, how many are ready, how many in generation
--   must be waited for, how many must reach the archive first; or `sweep`, 0, 0, 0 when stale groups are in the way of
--   first-in-first-out order: call expire first; or `given_up`, 0, 0, 0 when the round was undone or released: look at
--   the plan again
-- Caller: Claiming._claim_call; the trainer, any rank
-- Repeat: returns the manifest's batch
--
-- A batch that is replayed keeps the floors and the masking of its first claim, whatever rules hold now: its tokens are
-- as old as they were then.

local function refuse_step(clock, step)
  if step <= clock.committed then
    return fail(
      'HISTORY_GONE',
      'step %s was committed and its batch is no longer kept; the oldest step that can be replayed is %s',
      step,
      clock.history + 1
    )
  end
  if clock.resume ~= 'fresh' and step - clock.checkpoint > clock.max_uncheckpointed then
    return fail(
      'CHECKPOINT_OVERDUE',
      'the last checkpoint is of step %s, and %s steps are held for the next one; call checkpoint(), '
        .. 'or raise max_uncheckpointed_steps',
      clock.checkpoint,
      clock.max_uncheckpointed
    )
  end
  return nil
end

local function token_threshold(clock)
  return clock.threshold + clock.token_shift
end

-- The sum of the staleness of the groups in a reply of `describe_groups`, whose first one is at `first`.
local function total_staleness(reply, first, step)
  local total = 0
  for at = first, #reply do
    total = total + math.max(0, step - 1 - (reply[at][2] or NO_TOKENS))
  end
  return total
end

local function claim_new(clock, manifest, step, want, claim_round, releases, step_groups)
  local lowest, old = stale_bound(stale_version(clock, step)), 0
  if clock.order == 'fifo' then
    old = redis.call('ZCOUNT', clock.prefix .. 'by_version', '-inf', '(' .. lowest)
    if old > 0 and not is_saving(clock, now_ms()) then return { 'sweep', 0, 0, 0 } end
  end
  local ready, stragglers = count_ready(clock, step)
  local unarchived = count_unarchived(clock, step)
  local must_wait = stragglers + unarchived > 0 and want > 0
  if ready < want or must_wait then return { 'short', ready, stragglers, unarchived } end
  local ids = first_fresh(clock, lowest, want, old)
  move_batch(clock, ids, 'completed', 'claimed', step)
  call_many('ZREM', clock.prefix .. 'by_version', ids)
  local reply = { 'batch', clock.floors, claim_round, releases, token_threshold(clock) }
  local first = #reply + 1
  describe_groups(clock, ids, reply)
  redis.call('UNLINK', manifest)
  -- stylua: ignore
  redis.call('HSET', manifest, 'ids', table.concat(ids, ','), 'floors', clock.floors, 'epoch', clock.epoch,
    'version', clock.version, 'claimed_ms', now_ms(), 'numbered_in', clock.epoch, 'round', claim_round,
    'releases', releases, 'rules_revision', clock.rules_revision or 1, 'token_threshold', token_threshold(clock),
    'step_groups', step_groups, 'staleness', total_staleness(reply, first, step))
  write_clock(clock, { claimed_step = math.max(clock.claimed_step, step) })
  wake(clock, EVENT.claim)
  return reply
end

local function claim(keys, args)
  local incarnation, epoch, nonce, step, want, claim_round, releases, step_groups = unpack(args)
  check_whole(step, claim_round)
  check_counts(want, releases, step_groups)
  local clock, err = read_clock_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  if clock.kind == 'eval' then return fail('EVALUATION', 'groups of an evaluation are never trained') end
  step, claim_round = tonumber(step), tonumber(claim_round)
  local manifest = manifest_key(clock, step)
  local claimed_round, claimed_releases, given_up = claim_numbers(clock, manifest)
  if has_batch(manifest) then
    claim_round = math.max(claimed_round, claim_round) -- takes over what an earlier round's rank is about to undo
    local floors, threshold, planned = fields(manifest, 'floors', 'token_threshold', 'step_groups')
    step_groups = math.max(tonumber(planned or '0'), step_groups) -- a claim that saw no plan knows of one task only
    -- stylua: ignore
    redis.call('HSET', manifest, 'numbered_in', clock.epoch, 'round', claim_round, 'releases', claimed_releases,
      'step_groups', step_groups)
    local reply = { 'batch', floors, claim_round, claimed_releases, tonumber(threshold or token_threshold(clock)) }
    return describe_groups(clock, manifest_ids(manifest), reply)
  end
  if claim_round <= given_up then return { 'given_up', 0, 0, 0 } end
  return refuse_step(clock, step)
    or claim_new(clock, manifest, step, tonumber(want), claim_round, tonumber(releases), step_groups)
end
