-- The ids of groups in ranges of sorted sets, all at one instant.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, then per range: index, low, high
--   index: a status or by_version   low, high: scores, as ZRANGE takes them
-- Returns: per range, a list of ids
-- Caller: Querying._ids; monitors
-- Repeat: only reads
--
-- This is a function because Redis 7.0 refuses a transaction, even one that only reads, while its memory is full.
local FIRST_RANGE = 2

local function find(keys, args)
  local incarnation = unpack(args, 1, FIRST_RANGE - 1)
  check_rows(args, FIRST_RANGE, 3)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local found = {}
  for at = FIRST_RANGE, #args, 3 do
    local index, low, high = unpack(args, at, at + 2)
    found[#found + 1] = redis.call('ZRANGE', clock.prefix .. index, low, high, 'BYSCORE')
  end
  return found
end
