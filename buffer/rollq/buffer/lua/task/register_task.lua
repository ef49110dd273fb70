-- Creates a task's clock with its rules, unless it exists.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, events, epoch, nonce, version, from_step, record, file, digest, then rules
--   events: the channels of wake-ups, without their kind   record, file, digest: as in change_rules
--   rules: name, value of each
-- Returns: the epoch of the clock
-- Caller: Registry.register_task; every role, when it starts, and operators
-- Repeat: changes nothing
local FIRST_RULE = 10

local function register_task(keys, args)
  local incarnation, events, epoch, nonce, version, from_step, record, file, digest = unpack(args, 1, FIRST_RULE - 1)
  check_given(incarnation, events, nonce, record, file, digest)
  check_whole(epoch, version, from_step)
  check_rows(args, FIRST_RULE, 2)
  local clock_key = keys[1]
  local existing, live_epoch = fields(clock_key, 'incarnation', 'epoch')
  if existing and existing ~= incarnation then
    return fail('STORE_LOST', 'the store holds another incarnation of this run')
  end
  if existing then return tonumber(live_epoch) end
  -- a task that joins late owes no batch for the steps before
  local committed = math.max(tonumber(from_step), tonumber(version))
  -- this task has no tokens of earlier epochs
  local floors = tonumber(epoch) > 0 and exact(epoch - 1) .. ':0' or ''
  -- stylua: ignore
  redis.call('HSET', clock_key, 'incarnation', incarnation, 'events', events, 'epoch', epoch, 'nonce', nonce,
    'version', version, 'step', committed + 1, 'committed', committed, 'claimed_step', committed,
    'checkpoint', from_step, 'history', 0, 'first_manifest', committed, 'control', 'run', 'control_revision', 0,
    'rules_revision', 1, 'reaped_ms', 0, 'hold_until_ms', 0, 'saving_until_ms', 0, 'pin', '', 'open_evaluations', 0,
    'floors', floors, 'undone', 0, 'revision', new_revision(), unpack(args, FIRST_RULE))
  record_rules(task_prefix(clock_key), 1, committed + 1, record, file, digest)
  redis.call('HSET', task_prefix(clock_key) .. 'progress', 'cursor', 0, 'admitted', 0, 'consumed', 0)
  return tonumber(epoch)
end
