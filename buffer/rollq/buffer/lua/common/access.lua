-- Reading the clock of a task and the hash of a run, and refusing callers from another incarnation or a dead epoch.
--
-- KEYS[1] of a task function is the task's clock. KEYS[1] of a run function is the run's `run` hash. All other keys
-- share the hash tag of KEYS[1], and are built from its prefix.

-- stylua: ignore
local CLOCK_FIELDS = {
  'incarnation', 'epoch', 'nonce', 'step', 'version', 'threshold', 'control', 'events', 'order', 'expiry', 'expired',
  'group_size', 'min_valid', 'max_tries', 'max_deaths', 'lease_ms', 'audit', 'partial', 'committed', 'claimed_step',
  'checkpoint', 'history', 'max_uncheckpointed', 'resume', 'reaped_ms', 'hold_until_ms', 'batch_groups', 'schedule',
  'kind', 'token_shift', 'max_uses', 'cooldown', 'stragglers', 'interruptions', 'keep_window', 'saving_until_ms',
  'saving_ms', 'pin', 'open_evaluations', 'prompt_stats', 'sleep', 'control_revision', 'saver', 'saved_by', 'floors',
  'first_manifest', 'undone',
}
-- stylua: ignore
local CLOCK_STRINGS = {
  incarnation = true, nonce = true, control = true, events = true, order = true, expiry = true, expired = true,
  resume = true, schedule = true, kind = true, stragglers = true, pin = true, sleep = true, saver = true,
  saved_by = true, floors = true,
}

local function task_prefix(clock_key)
  return string.sub(clock_key, 1, -6) -- without 'clock'
end

local function run_prefix(run_key)
  return string.sub(run_key, 1, -4) -- without 'run'
end

local function store_lost(key, found)
  if found then
    return fail(
      'STORE_LOST',
      '%s belongs to another incarnation of this run: the store was emptied, and the run created again',
      key
    )
  end
  return fail('STORE_LOST', '%s is gone: the store was emptied, or restarted without its data', key)
end

local function epoch_replaced(epoch, live)
  return fail('FENCED', 'epoch %s was replaced by epoch %s', epoch, live)
end

-- The task's clock as a table, numbers as numbers, with `prefix` and `key`; or nil and an error reply.
local function read_clock(key, incarnation)
  local clock = { prefix = task_prefix(key), key = key }
  for i, value in ipairs(redis.call('HMGET', key, unpack(CLOCK_FIELDS))) do
    local name = CLOCK_FIELDS[i]
    clock[name] = CLOCK_STRINGS[name] and value or tonumber(value)
  end
  if clock.incarnation ~= incarnation then return nil, store_lost(key, clock.incarnation) end
  return clock
end

-- Like read_clock, for the trainer: `epoch` and `nonce` must be those of the live one.
local function read_clock_as_trainer(key, incarnation, epoch, nonce)
  local clock, err = read_clock(key, incarnation)
  if err then return nil, err end
  if clock.epoch < tonumber(epoch) then
    return nil, fail('TASK_BEHIND', '%s is still of epoch %s: the task was registered meanwhile', key, clock.epoch)
  end
  if clock.epoch ~= tonumber(epoch) or clock.nonce ~= nonce then return nil, epoch_replaced(epoch, clock.epoch) end
  return clock
end

-- Wakes the roles that wait for this kind of event, in this task or in all.
local function wake(clock, kind)
  redis.call('PUBLISH', clock.events .. ':' .. kind, clock.prefix)
end

-- The prefix of the run's keys; or nil and an error reply.
local function read_run(key, incarnation)
  local found = redis.call('HGET', key, 'incarnation')
  if found ~= incarnation then return nil, store_lost(key, found) end
  return run_prefix(key)
end

-- Like read_run, for the trainer: `epoch` and `nonce` must be those of the live one.
local function read_run_as_trainer(key, incarnation, epoch, nonce)
  local prefix, err = read_run(key, incarnation)
  if err then return nil, err end
  local live_epoch, live_nonce = fields(prefix .. 'trainer', 'epoch', 'nonce')
  if live_epoch ~= epoch or live_nonce ~= nonce then return nil, epoch_replaced(epoch, live_epoch or '?') end
  return prefix
end
