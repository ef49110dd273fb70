-- The index of a snapshot: a task's clock, its status sets and all its other small keys, at one instant.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, then statuses
-- Returns: the clock (flat hash), a list of last part of the key, hash|list, content, and per status: id, score, ...
-- Caller: Saving._index; a save
-- Repeat: only reads
--
-- Only `find` reads whole sets too. All must be of one instant; 10,000 groups take about 5 ms.
local function read_parts(clock)
  local parts = {}
  local function add(name, kind)
    local key = clock.prefix .. name
    local content = kind == 'hash' and redis.call('HGETALL', key) or redis.call('LRANGE', key, 0, -1)
    if #content > 0 then parts[#parts + 1] = { name, kind, content } end
    return content
  end
  add('progress', 'hash')
  add('rules', 'hash')
  add('outcomes', 'list')
  add('last_error', 'hash')
  add('prompt_file', 'hash')
  add('too_long', 'hash')
  add('unusable', 'hash')
  add('unusable_rows', 'hash')
  add('excluded', 'hash')
  add('sources', 'hash')
  for step = clock.first_manifest, clock.claimed_step do
    add('manifest:' .. step, 'hash')
  end
  add('batches_over', 'list')
  local batches = add('batches', 'hash')
  for i = 2, #batches, 2 do
    add('batch:' .. batches[i], 'hash')
    add('batch:' .. batches[i] .. ':groups', 'list')
  end
  return parts
end

local function save_index(keys, args)
  local incarnation = unpack(args, 1, 1)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local reply = { redis.call('HGETALL', clock.key), read_parts(clock) }
  for i = 2, #args do
    reply[#reply + 1] = redis.call('ZRANGE', clock.prefix .. args[i], 0, -1, 'WITHSCORES')
  end
  return reply
end
