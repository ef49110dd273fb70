-- Takes the batch of a step, or as much of it as is there. From then on, a manifest fixes the batch: its groups and
-- their order stay, and none is added once it is whole.
-- Moves: completed -> claimed
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, step, want, claim_round, releases, step_groups, seed, so_far, known, most_bytes
--   want: how many groups   claim_round, releases: of the step's plan   step_groups: of the batch, of all its tasks
--   seed: of draws   so_far: 1 to take what is there of a batch that is short
--   known: how many of its groups the caller has already
--   most_bytes: of prompts and frames that come with the groups
-- Returns: `batch`, or `open` for a batch that still fills; then the floors of dead epochs when its first groups were
--   claimed, its round, its releases, the staleness at which its tokens are masked, lines of later groups for which
--   both differ (see `later_line`); what an open one lacks: how many groups are ready, how many in generation must be
--   waited for, how many must reach the archive first; and its groups after the known ones (see `describe_groups`),
--   each that fits with its prompt and the frame of its samples. Or
--   `short` and what the batch lacks; or `sweep`, 0, 0, 0 when stale groups are in the way of an order that is not by
--   version: call expire first; or `given_up`, 0, 0, 0 when the round was undone or released: look at the plan again
-- Caller: Claiming._claim_call; the trainer, any rank
-- Repeat: returns the manifest's batch
--
-- A batch that is replayed keeps the floors and the masking of its first claim under any later rules: its tokens are as
-- old as they were then. A batch that was open fills further.

local FIRST_OF_BATCH = 10 -- where the groups of a batch begin in a reply

-- Adds the prompt and the frame to groups in a reply of `describe_groups`, from index `first` on, as far as both fit
-- into `most_bytes`. Frames in another place are left out.
local function attach_frames(clock, reply, first, most_bytes)
  for at = first, #reply do
    local id, payload = reply[at][1], reply[at][7]
    local rollout, frame = rollout_key(clock.prefix, id), nil
    local size = redis.call('HSTRLEN', group_key(clock.prefix, id), 'prompt')
    if payload == '' then
      size = size + redis.call('HSTRLEN', rollout, WHOLE)
      frame = size <= most_bytes and redis.call('HLEN', rollout) == 1 and redis.call('HGET', rollout, WHOLE)
    elseif not is_away(payload) then
      local key = payload_key(clock.prefix, id, payload)
      size = size + redis.call('STRLEN', key)
      frame = size <= most_bytes and redis.call('GET', key)
    end
    if frame then
      append_pair(reply[at], group_fields(clock, id, 'prompt'), frame)
      most_bytes = most_bytes - size
    end
  end
end

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

-- The sum of the staleness of the groups in a reply of `describe_groups`, from index `first` on.
local function total_staleness(reply, first, step)
  local total = 0
  for at = first, #reply do
    total = total + math.max(0, step - 1 - (reply[at][2] or NO_TOKENS))
  end
  return total
end

-- How many groups of an open batch may be taken before it is whole: the groups that it has in the end, whichever others
-- finish first. In the order of a claim, an unfinished group may come before every finished one. Without stragglers to
-- wait for, the first groups to finish are the batch. A batch that is drawn is drawn at once, from all that is there;
-- in the order `newest`, any later group may come before these.
local function count_sure(clock, missing, ready)
  if is_drawn(clock) or clock.order == 'newest' then return 0 end
  if clock.stragglers ~= 'wait' then return math.min(missing, ready) end
  local unfinished = 0
  for _, status in ipairs({ 'pending', 'running', 'gathered', 'aborted', 'expired' }) do
    unfinished = unfinished + redis.call('ZCARD', clock.prefix .. status)
  end
  return math.max(0, math.min(missing - unfinished, ready))
end

local function begin_manifest(clock, manifest, claim_round, releases, step_groups)
  redis.call('UNLINK', manifest)
  -- stylua: ignore
  redis.call('HSET', manifest, 'ids', '', 'floors', clock.floors, 'epoch', clock.epoch, 'version', clock.version,
    'claimed_ms', now_ms(), 'numbered_in', clock.epoch, 'round', claim_round, 'releases', releases,
    'rules_revision', clock.rules_revision or 1, 'token_threshold', token_threshold(clock),
    'step_groups', step_groups, 'staleness', 0)
end

-- Moves the first `count` fresh groups into a manifest, after those that it has. Returns how many it moved.
local function extend(clock, manifest, step, lowest, count, old, seed)
  local ids = manifest_ids(manifest)
  local new, probabilities = choose_fresh(clock, step, lowest, count, old, seed)
  if #probabilities > 0 then redis.call('HSET', manifest, 'probabilities', table.concat(probabilities, ',')) end
  move_batch(clock, new, 'completed', 'claimed', step)
  call_many('ZREM', clock.prefix .. 'by_version', new)
  local threshold, floors = token_threshold(clock), clock.floors
  local last_threshold, last_floors, later = fields(manifest, 'token_threshold', 'floors', 'later')
  for _, line_threshold, line_floors in string.gmatch(later or '', LATER) do
    last_threshold, last_floors = line_threshold, line_floors
  end
  if tonumber(last_threshold) ~= threshold or last_floors ~= floors then
    redis.call('HSET', manifest, 'later', (later or '') .. later_line(#ids, threshold, floors))
  end
  for _, id in ipairs(new) do
    ids[#ids + 1] = id
  end
  redis.call('HSET', manifest, 'ids', table.concat(ids, ','))
  return #new
end

-- The reply for a manifest, without the groups that the caller knows.
local function describe_batch(clock, manifest, word, lack, request)
  local floors, claim_round, releases, threshold, later =
    fields(manifest, 'floors', 'round', 'releases', 'token_threshold', 'later')
  local numbers = { tonumber(claim_round), tonumber(releases), tonumber(threshold) }
  local reply = { word, floors, numbers[1], numbers[2], numbers[3], later or '', unpack(lack) }
  describe_manifest(clock, manifest, request.known, reply)
  attach_frames(clock, reply, FIRST_OF_BATCH, request.most_bytes)
  return reply
end

-- Starts the batch of a step, or adds to it, if there is enough. Returns the reply.
local function fill(clock, manifest, step, request)
  local held, open = #manifest_ids(manifest), open_target(manifest)
  local target = open and math.min(open, request.want) or request.want
  local missing = math.max(0, target - held)
  local lowest, old = stale_bound(stale_version(clock, step)), 0
  if not sorts_by_version(clock) then
    old = redis.call('ZCOUNT', clock.prefix .. 'by_version', '-inf', '(' .. lowest)
    if old > 0 and not is_saving(clock, now_ms()) then return { 'sweep', 0, 0, 0 } end
  end
  local ready, stragglers = count_ready(clock, step)
  local unarchived = count_unarchived(clock, step)
  local lack = { held + ready, stragglers, unarchived }
  local is_complete = missing == 0 or (ready >= missing and stragglers + unarchived == 0)
  local count = is_complete and missing or 0
  if request.so_far and not is_complete and unarchived == 0 then count = count_sure(clock, missing, ready) end
  if count == 0 and not is_complete then
    if not (open and request.so_far) then return { 'short', unpack(lack) } end
    return describe_batch(clock, manifest, 'open', lack, request)
  end
  if not open then begin_manifest(clock, manifest, request.claim_round, request.releases, request.step_groups) end
  local added = extend(clock, manifest, step, lowest, count, old, request.seed)
  if is_complete then
    redis.call('HDEL', manifest, 'open')
    redis.call('HSET', manifest, 'claimed_ms', now_ms())
  else
    redis.call('HSET', manifest, 'open', target)
  end
  write_clock(clock, { claimed_step = math.max(clock.claimed_step, step) })
  wake(clock, EVENT.claim)
  local word, still = is_complete and 'batch' or 'open', is_complete and { 0, 0, 0 } or lack
  local reply = describe_batch(clock, manifest, word, still, request)
  local first = math.max(FIRST_OF_BATCH, #reply - added + 1)
  redis.call('HINCRBY', manifest, 'staleness', total_staleness(reply, first, step))
  return reply
end

local function claim(keys, args)
  local incarnation, epoch, nonce, step, want, claim_round, releases, step_groups, seed, so_far, known, most_bytes =
    unpack(args)
  check_whole(step, claim_round, seed)
  check_counts(want, releases, step_groups, known, most_bytes)
  check_choice(so_far, '0', '1')
  local clock, err = read_clock_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  if clock.kind == 'eval' then return fail('EVALUATION', 'groups of an evaluation are never trained') end
  step, claim_round = tonumber(step), tonumber(claim_round)
  local manifest = manifest_key(clock, step)
  local claimed_round, claimed_releases, given_up = claim_numbers(clock, manifest)
  local request = {
    want = tonumber(want),
    claim_round = claim_round,
    releases = tonumber(releases),
    step_groups = step_groups,
    seed = seed,
    so_far = so_far == '1',
    known = tonumber(known),
    most_bytes = tonumber(most_bytes),
  }
  if has_batch(manifest) then
    claim_round = math.max(claimed_round, claim_round) -- takes over what an earlier round's rank is about to undo
    local planned = redis.call('HGET', manifest, 'step_groups') or '0'
    step_groups = math.max(tonumber(planned), step_groups) -- a claim that saw no plan counts one task only
    -- stylua: ignore
    redis.call('HSET', manifest, 'numbered_in', clock.epoch, 'round', claim_round, 'releases', claimed_releases,
      'step_groups', step_groups)
    if open_target(manifest) then return fill(clock, manifest, step, request) end
    return describe_batch(clock, manifest, 'batch', { 0, 0, 0 }, request)
  end
  if claim_round <= given_up then return { 'given_up', 0, 0, 0 } end
  return refuse_step(clock, step) or fill(clock, manifest, step, request)
end
