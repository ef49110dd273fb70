-- Gives an order to one worker, which learns of it when it reports next.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, worker, order, seen
--   order: run|pause|drain   seen: the worker's order as the caller has read it, '' for none
-- Returns: 1, or -1 when the worker has got another order since the caller read it
-- Caller: Steering.order_worker; operators
-- Repeat: returns -1, and so does a copy of the call that arrives after a later one
local function order_worker(keys, args)
  local incarnation, worker, order, seen = unpack(args)
  check_given(worker, seen)
  check_choice(order, 'run', 'pause', 'drain')
  local prefix, err = read_run(keys[1], incarnation)
  if err then return err end
  local orders = prefix .. 'orders'
  if (redis.call('HGET', orders, worker) or '') ~= seen then return -1 end
  local number = tonumber(string.match(seen, '^%d+') or '0')
  redis.call('HSET', orders, worker, exact(number + 1) .. ' ' .. order)
  return 1
end
