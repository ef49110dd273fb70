-- Moves groups that are too old out of the way. This only tidies up: claim and readiness never count such groups.
-- Moves: completed|aborted -> expired, or dropped
-- KEYS: clock
-- ARGV: incarnation, limit, offset, then statuses
--   offset: how many of the oldest groups were skipped so far   statuses: completed, aborted, or both
-- Returns: how many expired, how many were dropped, more 0|1: call again, how many more were skipped
-- Caller: Sweeping.expire; any role
-- Repeat: finds only groups that became too old since
local FIRST_STATUS = 4

local function expire(keys, args)
  local incarnation, limit, offset = unpack(args, 1, FIRST_STATUS - 1)
  check_counts(limit, offset)
  local wanted = {}
  for at = FIRST_STATUS, #args do
    check_choice(args[at], 'completed', 'aborted')
    wanted[args[at]] = true
  end
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  limit = tonumber(limit)
  if is_saving(clock, now_ms()) then return { 0, 0, 0, 0 } end
  local by_version, stale = clock.prefix .. 'by_version', stale_version(clock, clock.step)
  local ids = redis.call('ZRANGEBYSCORE', by_version, '-inf', '(' .. stale_bound(stale), 'LIMIT', offset, limit)
  if #ids == 0 then return { 0, 0, 0, 0 } end
  local left, scored, expired, skipped = { completed = {}, aborted = {} }, {}, {}, 0
  for _, id in ipairs(ids) do
    local status, arrival, oldest, counted_in = group_fields(clock, id, 'status', 'arrival', 'oldest', 'counted_in')
    local cap = cap_of(clock, counted_in)
    oldest = capped(oldest, cap)
    if not wanted[status] then
      skipped = skipped + 1
    elseif oldest > stale then -- its weights were published again, and `recount` follows
      file_result(clock, id, status, oldest, tonumber(arrival))
    else
      left[status][#left[status] + 1] = id
      expired[#expired + 1] = id
      append_pair(scored, arrival, id)
      if clock.expired ~= 'drop' then reset_group(clock, id, stale, cap) end
    end
  end
  for status, gone in pairs(left) do
    call_many('ZREM', clock.prefix .. status, gone)
  end
  call_many('ZREM', by_version, expired)
  local filed = #expired > 0 and file_expired(clock, scored) or 0
  wake(clock, EVENT.expire)
  return { filed, #expired - filed, #ids == limit and 1 or 0, skipped }
end
