-- Moves one group for an operator: drops it, sends it back to be sampled again, or files it and its samples as failed.
-- Moves: pending|running|completed|cooling|aborted|expired|filtered|failed -> dropped; completed|filtered|failed ->
--   pending; running|completed -> failed
-- KEYS: clock
-- ARGV: incarnation, id, order, dry_run, seen, mark, expected
--   order: drop|requeue|quarantine   dry_run: 1 to change nothing
--   seen: the mark of the last order, as the caller has read it, '' for none   mark: of this order; no other has it
--   expected: the status in which the caller saw the group; '' for any
-- Returns: `done`, or why nothing has changed: `gone`; `status`, which does not allow it; `moved`, as its status is not
--   the expected one; `batch`, which has not ended; `saving` of the buffer; `unsampled`, a requeue where nobody would
--   sample it: in a task that is offline, or after an evaluation; or `ordered` by somebody else since the caller read
--   `seen`. Then the status that it had
-- Caller: Steering.order_group; operators
-- Repeat: finds its mark, or a later order's, and moves nothing
local OF_A_BATCH = { running = true, finalizing = true } -- states of a batch that has not ended
local FROM = {
  drop = {
    pending = true,
    running = true,
    completed = true,
    cooling = true,
    aborted = true,
    expired = true,
    filtered = true,
    failed = true,
  },
  requeue = { completed = true, filtered = true, failed = true },
  quarantine = { running = true, completed = true },
}

local function refusal(clock, order, status, batch, expected)
  if not status then return 'gone' end
  if expected ~= '' and status ~= expected then return 'moved' end
  if not FROM[order][status] then return 'status' end
  if batch and OF_A_BATCH[redis.call('HGET', batch_key(clock, batch), 'state')] then return 'batch' end
  if order == 'requeue' and (clock.offline == 1 or clock.kind == 'eval') then return 'unsampled' end
  return is_saving(clock, now_ms()) and 'saving'
end

local function carry_out(clock, id, order, status)
  local key = group_key(clock.prefix, id)
  if order == 'drop' then
    drop_group(clock, id, 'by_hand')
  elseif order == 'quarantine' then
    if status == 'running' then note_lease(key, 'quarantined', exact(now_ms())) end
    redis.call('HSET', key, 'error', 'quarantined by hand')
    file_for_audit(clock, id, 'failed', '') -- it is not an error of the task
  else
    local deaths = tonumber(redis.call('HGET', key, 'deaths'))
    redis.call('HDEL', key, 'batch') -- it has ended
    sample_anew(clock, id, math.min(deaths, clock.max_deaths - 1))
  end
end

local function order_group(keys, args)
  local incarnation, id, order, dry_run, seen, mark, expected = unpack(args)
  check_counts(id)
  check_choice(order, 'drop', 'requeue', 'quarantine')
  check_choice(dry_run, '0', '1')
  check_given(seen, mark, expected)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local key = group_key(clock.prefix, id)
  local status, batch, last = fields(key, 'status', 'batch', 'ordered')
  if last == mark then return { 'done', status } end
  local refused = refusal(clock, order, status, batch, expected)
  if refused then return { refused, status or '' } end
  if dry_run == '1' then return { 'done', status } end
  if (last or '') ~= seen then return { 'ordered', status } end
  redis.call('HSET', key, 'ordered', mark)
  withdraw(clock, id, status)
  carry_out(clock, id, order, status)
  wake(clock, EVENT.admit)
  return { 'done', status }
end
