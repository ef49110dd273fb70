-- A worker's last words on itself, for monitors; forgets workers that have been silent for an hour.
-- KEYS[1] run hash   ARGV incarnation, worker, report (JSON), forget 0|1
-- Returns 1.   Caller: worker, each second; with forget when it stops.   A repeat overwrites.
local function report_worker(keys, args)
  local prefix, err = read_run(keys[1], args[1])
  if err then return err end
  local workers, now = prefix .. 'workers', now_ms()
  if args[4] == '1' then return redis.call('HDEL', workers, args[2]) end
  -- a trainer that shares its accelerators waits for engines to sleep
  local state = '"state":"(%a+)"'
  local before = redis.call('HGET', workers, args[2])
  if not before or string.match(before, state) ~= string.match(args[3], state) then
    redis.call('PUBLISH', prefix .. 'events', 'worker')
  end
  if redis.call('HSET', workers, args[2], exact(now) .. ' ' .. args[3]) == 0 then return 1 end
  -- the table only grows by new names
  local all = redis.call('HGETALL', workers)
  for i = 1, #all, 2 do
    local at = tonumber(string.match(all[i + 1], '^%d+'))
    if at and now - at > 3600000 then redis.call('HDEL', workers, all[i]) end
  end
  return 1
end
