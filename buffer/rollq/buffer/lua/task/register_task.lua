-- Creates a task's clock with its rules, or compares the rules with those of the clock that exists.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, events, epoch, nonce, version, from_step, then per rule: name, value
--   events: the channels of wake-ups, without their kind
-- Returns: the epoch of the clock
-- Caller: BufferCore.register_task; every role, when it starts
-- Repeat: compares and changes nothing
local FIRST_RULE = 7

local function compare_rules(clock_key, args)
  for at = FIRST_RULE, #args, 2 do
    local name, value = unpack(args, at, at + 1)
    local existing = redis.call('HGET', clock_key, name)
    if existing ~= value then
      local task = string.match(clock_key, ':([^:]*)}:clock$')
      return fail(
        'RUN_MISMATCH',
        "task '%s' was registered with %s = %s, this role has %s: a run keeps its settings; change it "
          .. 'back, or give the run another name',
        task,
        name,
        tostring(existing),
        value
      )
    end
  end
  return tonumber((fields(clock_key, 'epoch')))
end

local function register_task(keys, args)
  local incarnation, events, epoch, nonce, version, from_step = unpack(args, 1, FIRST_RULE - 1)
  check_given(incarnation, events, nonce)
  check_whole(epoch, version, from_step)
  check_rows(args, FIRST_RULE, 2)
  local clock_key = keys[1]
  local existing = redis.call('HGET', clock_key, 'incarnation')
  if existing and existing ~= incarnation then
    return fail('STORE_LOST', 'the store holds another incarnation of this run')
  end
  if existing then return compare_rules(clock_key, args) end
  -- a task that joins late owes no batch for the steps before
  local committed = math.max(tonumber(from_step), tonumber(version))
  -- no token of this task is of an epoch before
  local floors = tonumber(epoch) > 0 and exact(epoch - 1) .. ':0' or ''
  -- stylua: ignore
  redis.call('HSET', clock_key, 'incarnation', incarnation, 'events', events, 'epoch', epoch, 'nonce', nonce,
    'version', version, 'step', committed + 1, 'committed', committed, 'claimed_step', committed,
    'checkpoint', from_step, 'history', 0, 'first_manifest', committed, 'control', 'run', 'control_revision', 0,
    'reaped_ms', 0, 'hold_until_ms', 0, 'saving_until_ms', 0, 'pin', '', 'open_evaluations', 0,
    'floors', floors, 'undone', 0, 'revision', new_revision(), unpack(args, FIRST_RULE))
  redis.call('HSET', task_prefix(clock_key) .. 'progress', 'cursor', 0, 'admitted', 0, 'consumed', 0)
  return tonumber(epoch)
end
