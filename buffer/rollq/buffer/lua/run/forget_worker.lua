-- Removes the report of a worker that stops, and its order.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, worker
-- Returns: 1 when there was a report, else 0
-- Caller: Leasing.forget_worker; workers, when they stop
-- Repeat: finds nothing
local function forget_worker(keys, args)
  local incarnation, worker = unpack(args)
  check_given(worker)
  local prefix, err = read_run(keys[1], incarnation)
  if err then return err end
  redis.call('HDEL', prefix .. 'orders', worker)
  return redis.call('HDEL', prefix .. 'workers', worker)
end
