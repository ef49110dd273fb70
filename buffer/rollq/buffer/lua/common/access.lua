-- Reads the clock of a task and the hash of a run, and refuses callers from another incarnation or a dead epoch.
--
-- KEYS[1] of a task function is the task's clock. KEYS[1] of a run function is the run's `run` hash. All other keys
-- share the hash tag of KEYS[1], and are built from its prefix.
--
-- Every function reads the whole clock. The server keeps clocks in memory between calls, and reads a clock again when
-- its `revision` has changed. So every write of a clock gives it a new revision.

local MOST_CLOCKS = 1000
-- stylua: ignore
local CLOCK_STRINGS = {
  incarnation = true, nonce = true, control = true, events = true, order = true, expiry = true, expired = true,
  resume = true, schedule = true, kind = true, stragglers = true, pin = true, sleep = true, saver = true,
  saved_by = true, floors = true, revision = true,
}

local clocks, clock_count, clock_writes = {}, 0, 0 -- the fields of clocks by key

local function task_prefix(clock_key)
  return string.sub(clock_key, 1, -6) -- without 'clock'
end

local function run_prefix(run_key)
  return string.sub(run_key, 1, -4) -- without 'run'
end

-- Wraps the function `run`, so that it is refused before its first write while a cluster moves its keys one by one.
-- Only some of the keys are on this server then, and the server refuses any access to the others, which would stop
-- `run` halfway. A key that never exists is always among these others.
local function with_all_keys(run)
  return function(keys, args)
    redis.call('EXISTS', keys[1] .. ':absent')
    return run(keys, args)
  end
end

local function store_lost(key, found)
  if found then
    return fail(
      'STORE_LOST',
      '%s belongs to another incarnation of this run: the store was emptied, and the run created again',
      key
    )
  end
  return fail(
    'STORE_LOST',
    '%s is missing: it was never created, or the store was emptied, lost its data, or evicts keys (maxmemory-policy)',
    key
  )
end

local function epoch_replaced(epoch, live)
  return fail('FENCED', 'epoch %s was replaced by epoch %s', epoch, live)
end

local function clock_value(name, text)
  return CLOCK_STRINGS[name] and text or tonumber(text)
end

local function refuse_assignment(_, name)
  error('clock.' .. name .. ' was assigned to; write_clock sets fields of a clock')
end

-- Reads a clock from the store, and keeps it.
local function load_clock(key)
  local values, stored = { prefix = task_prefix(key), key = key }, redis.call('HGETALL', key)
  for i = 1, #stored, 2 do
    values[stored[i]] = clock_value(stored[i], stored[i + 1])
  end
  values.view = setmetatable({}, { __index = values, __newindex = refuse_assignment })
  if not clocks[key] then
    if clock_count == MOST_CLOCKS then
      clocks, clock_count = {}, 0
    end
    clock_count = clock_count + 1
  end
  clocks[key] = values
  return values
end

-- The task's clock as a table, numbers as numbers, with `prefix` and `key`; or nil and an error reply.
local function read_clock(key, incarnation)
  local values = clocks[key]
  if not values or values.revision ~= redis.call('HGET', key, 'revision') then values = load_clock(key) end
  if values.incarnation ~= incarnation then return nil, store_lost(key, values.incarnation) end
  return values.view
end

-- A string that is unique to this write of a clock, on any server: the time, and the number of earlier writes here.
local function new_revision()
  clock_writes = clock_writes + 1
  return table.concat(redis.call('TIME'), '.') .. '-' .. clock_writes
end

-- Sets fields of the clock that read_clock has returned, in the store and in `clock`; false removes one.
local function write_clock(clock, changes)
  changes.revision = new_revision()
  local set, removed = {}, {}
  for name, value in pairs(changes) do
    if value then
      append_pair(set, name, value)
    else
      removed[#removed + 1] = name
    end
  end
  redis.call('HSET', clock.key, unpack(set))
  call_many('HDEL', clock.key, removed)
  local values = clocks[clock.key]
  for name, value in pairs(changes) do
    values[name] = clock_value(name, value)
  end
end

-- Keeps a record of a revision of a task's rules: the first step that may be claimed under them, the time, and what was
-- changed (JSON). `file`: the rules of the settings file that asked for them (JSON), '' without one; `digest` names
-- these rules for the life of the run.
local function record_rules(prefix, revision, step, record, file, digest)
  local rules, time = prefix .. 'rules', exact(now_ms())
  redis.call('HSET', rules, revision, table.concat({ exact(step), time, record }, ' '))
  if file ~= '' then redis.call('HSET', rules, 'file', file, 'seen:' .. digest, revision) end
end

-- Like read_clock, for the trainer: `epoch` and `nonce` must belong to the live epoch.
local function read_clock_as_trainer(key, incarnation, epoch, nonce)
  local clock, err = read_clock(key, incarnation)
  if err then return nil, err end
  if clock.epoch < tonumber(epoch) then
    return nil, fail('TASK_BEHIND', '%s is in epoch %s: it was registered as the next one started', key, clock.epoch)
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

-- Like read_run, for the trainer: `epoch` and `nonce` must belong to the live epoch.
local function read_run_as_trainer(key, incarnation, epoch, nonce)
  local prefix, err = read_run(key, incarnation)
  if err then return nil, err end
  local live_epoch, live_nonce = fields(prefix .. 'trainer', 'epoch', 'nonce')
  if not live_epoch then return nil, store_lost(prefix .. 'trainer') end
  if live_epoch ~= epoch or live_nonce ~= nonce then return nil, epoch_replaced(epoch, live_epoch) end
  return prefix
end
