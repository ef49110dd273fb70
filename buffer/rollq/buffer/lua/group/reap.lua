-- Takes back groups whose lease ran out, as suspects. A group that was alone on its last try is quarantined. A lease
-- that ran out counts as a death and not as a try; as neither if its worker never confirmed it, because the reply was
-- lost.
-- Moves: running -> pending; failed, when it is quarantined
-- KEYS: clock
-- ARGV: incarnation, limit, producer
--   producer: the location of the calling producer, JSON; '' from other roles
-- Returns: how many went back, how many were quarantined, held 0|1
-- Caller: Sweeping.reap; any role, about once a second
-- Repeat: finds only leases that ran out since, and writes no second row of the history
--
-- If nobody has reaped for a third of a lease (at least 3 s), the server or every client was down, and leases could not
-- be renewed.
-- Then no worker is declared dead for one more lease: the reply is `held`.
--
-- The first call within every 10 seconds, from any role, appends a row to the history of the task.
local LEAST_OUTAGE_MS = 3000
local SILENT_PRODUCER_MS = 60000

-- Appends a row of depths and counters, unless one was written within the same 10 seconds.
local function note_history(clock, now)
  if math.floor(clock.reaped_ms / HISTORY.row_ms) == math.floor(now / HISTORY.row_ms) then return end
  local ready = count_ready(clock, clock.step)
  local history, row = clock.prefix .. 'history', { exact(now), clock.step, clock.version, ready }
  for _, status in ipairs(STATUSES) do
    row[#row + 1] = redis.call('ZCARD', clock.prefix .. status)
  end
  for _, count in ipairs(redis.call('HMGET', clock.prefix .. 'progress', unpack(HISTORY.counters))) do
    row[#row + 1] = count or 0
  end
  redis.call('RPUSH', history, table.concat(row, ','))
  redis.call('LTRIM', history, -HISTORY.rows, -1)
end

-- Whether no worker may be declared dead now.
local function is_held(clock, now)
  local was_away = now - clock.reaped_ms > math.max(clock.lease_ms / 3, LEAST_OUTAGE_MS)
  write_clock(clock, { reaped_ms = now, hold_until_ms = was_away and now + clock.lease_ms or clock.hold_until_ms })
  return is_ahead(clock.hold_until_ms, clock.lease_ms, now)
end

local function quarantine(clock, id, deaths, worker)
  redis.call('HSET', group_key(clock.prefix, id), 'deaths', deaths)
  redis.call('HINCRBY', clock.prefix .. 'progress', 'quarantined', 1)
  local last = ', the last (' .. (worker or '?') .. ') while it ran alone'
  file_for_audit(clock, id, 'failed', 'quarantined: ' .. deaths .. ' workers died with it' .. last)
end

local function requeue(clock, id, deaths, alone_from, confirmed)
  local key = group_key(clock.prefix, id)
  age_group(clock, id, stale_version(clock, clock.step))
  redis.call('HINCRBY', key, 'tries', -1)
  if confirmed then
    deaths = math.max(deaths, math.min(deaths + 1, alone_from))
    redis.call('HSET', key, 'deaths', deaths)
  end
  make_pending(clock, id, deaths)
end

-- No lease ends later than one lease from now, unless the server's clock was set back since it was granted.
local function shorten_leases(clock, now, limit)
  local running, latest = clock.prefix .. 'running', now + clock.lease_ms
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', running, '(' .. exact(latest), '+inf', 'LIMIT', 0, limit)) do
    redis.call('ZADD', running, latest, id)
  end
end

-- Notes the location of the producer that looks at the task, and forgets silent producers when a new one comes.
local function note_producer(clock, producer, now)
  local seen = clock.prefix .. 'producers'
  if producer == '' or redis.call('HSET', seen, producer, exact(now)) == 0 then return end
  local all = redis.call('HGETALL', seen)
  for i = 1, #all, 2 do
    if math.abs(now - (tonumber(all[i + 1]) or 0)) > SILENT_PRODUCER_MS then redis.call('HDEL', seen, all[i]) end
  end
end

local function reap(keys, args)
  local incarnation, limit, producer = unpack(args)
  check_counts(limit)
  check_given(producer)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local now = now_ms()
  shorten_leases(clock, now, limit)
  note_history(clock, now)
  note_producer(clock, producer, now)
  if is_held(clock, now) then return { 0, 0, 1 } end
  local requeued, quarantined, alone_from = 0, 0, lone_after(clock)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', clock.prefix .. 'running', '-inf', now, 'LIMIT', 0, limit)) do
    local deaths, alone, worker, confirmed = group_fields(clock, id, 'deaths', 'alone', 'worker', 'confirmed')
    withdraw(clock, id, 'running')
    note_lease(group_key(clock.prefix, id), confirmed and 'ran_out' or 'unconfirmed', exact(now))
    if alone == '1' and confirmed then
      quarantine(clock, id, tonumber(deaths) + 1, worker)
      quarantined = quarantined + 1
    else
      requeue(clock, id, tonumber(deaths), alone_from, confirmed)
      requeued = requeued + 1
    end
  end
  note_failures(clock, quarantined, false)
  if requeued > 0 then
    redis.call('HINCRBY', clock.prefix .. 'progress', 'requeued', requeued)
    wake(clock, EVENT.admit)
  end
  return { requeued, quarantined, 0 }
end
