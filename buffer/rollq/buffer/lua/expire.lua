-- completed, aborted that are too old -> expired or dropped. Only tidies up: claim and readiness never count them.
-- KEYS[1] clock   ARGV incarnation, limit
-- Returns expired, dropped, more 0|1.   Caller: anyone.   Idempotent by state.
local function expire(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local stale, limit = stale_version(clock, clock.step), tonumber(args[2])
  if clock.saving_until_ms > now_ms() then return { 0, 0, 0 } end
  local ids = redis.call('ZRANGEBYSCORE', clock.prefix .. 'by_version', '-inf', '(' .. stale_bound(stale), 'LIMIT', 0, limit)
  local left, scored = { completed = {}, aborted = {} }, {}
  for _, id in ipairs(ids) do
    local key = group_key(clock.prefix, id)
    local group = redis.call('HMGET', key, 'status', 'arrival')
    left[group[1]][#left[group[1]] + 1] = id
    scored[#scored + 1] = group[2]
    scored[#scored + 1] = id
    if clock.expired ~= 'drop' then
      reset_group(clock, id, stale)
    end
  end
  for status, gone in pairs(left) do many('ZREM', clock.prefix .. status, gone) end
  many('ZREM', clock.prefix .. 'by_version', ids)
  if #ids == 0 then return { 0, 0, 0 } end
  local filed = file_expired(clock, scored)
  redis.call('PUBLISH', clock.events, 'expire')
  return { filed, #ids - filed, #ids == limit and 1 or 0 }
end
