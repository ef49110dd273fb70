-- Stores a worker's report for monitors, and forgets workers that have been silent for an hour.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, worker, report
--   report: JSON
-- Returns: the worker's order: run|pause|drain
-- Caller: Leasing.report_worker; workers, every second
-- Repeat: writes the same again
local SILENT_MS = 3600000
local LOOKED_AT = 100
local STATE = '"state":"(%a+)"'

local function report_worker(keys, args)
  local incarnation, worker, report = unpack(args)
  check_given(worker, report)
  local prefix, err = read_run(keys[1], incarnation)
  if err then return err end
  local workers, now = prefix .. 'workers', now_ms()
  local before = redis.call('HGET', workers, worker)
  if not before or string.match(before, STATE) ~= string.match(report, STATE) then
    -- a trainer that shares its accelerators waits for engines to sleep
    redis.call('PUBLISH', prefix .. 'events:' .. EVENT.worker, '')
  end
  local order = string.match(redis.call('HGET', prefix .. 'orders', worker) or '', '%a+$') or 'run'
  if redis.call('HSET', workers, worker, exact(now) .. ' ' .. report) == 0 then return order end
  -- only new names grow the table: each new name checks some others, and forgets silent ones
  local reports = redis.call('HRANDFIELD', workers, LOOKED_AT, 'WITHVALUES')
  for i = 1, #reports, 2 do
    local name, last_report = unpack(reports, i, i + 1)
    local reported_ms = tonumber(string.match(last_report, '^%d+'))
    if reported_ms and math.abs(now - reported_ms) > SILENT_MS then
      redis.call('HDEL', workers, name)
      redis.call('HDEL', prefix .. 'orders', name)
    end
  end
  return order
end
