-- Makes a version the live version of a task: groups that are now too old stop counting at once. Tokens of dead epochs
-- that have published the same weights count as this version again.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, version, since
--   since: the first epoch since which every epoch that published this version had these weights
-- Returns: 1 when groups may count as newer now: call recount; else 0
-- Caller: Training.publish; the trainer, rank 0
-- Repeat: changes nothing
-- The levels, with `level` raised to `higher` for epochs from `since` on. Only the last entry can have `level`.
local function raise_levels(levels, level, higher, since)
  local entries = split(levels)
  local last, known = string.match(entries[#entries] or '', EPOCH_LEVEL)
  if tonumber(known) ~= level or tonumber(last) < since then return levels end
  local before = string.match(entries[#entries - 1] or '', EPOCH_LEVEL)
  entries[#entries] = last .. ':' .. exact(higher)
  local is_split = since > 0 and (not before or tonumber(before) < since - 1)
  if is_split then table.insert(entries, #entries, exact(since - 1) .. ':' .. exact(level)) end
  return table.concat(entries, ',')
end

-- Whether the last levels are `level`.
local function ends_with(levels, level)
  return tonumber(string.match(levels, ':(%d+)$')) == level
end

local function task_publish(keys, args)
  local incarnation, epoch, nonce, version, since = unpack(args)
  check_whole(version, since)
  local clock, err = read_clock_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  version = tonumber(version)
  local floors = clock.floors
  if version > clock.version then floors = raise_levels(floors, clock.version, version, tonumber(since)) end
  write_clock(clock, {
    version = math.max(clock.version, version),
    step = math.max(clock.step, version + 1),
    floors = floors,
  })
  wake(clock, EVENT.publish)
  return ends_with(floors, clock.version) and 1 or 0
end
