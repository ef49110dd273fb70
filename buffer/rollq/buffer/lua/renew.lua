-- Moves the deadline of leases.
-- KEYS[1] clock   ARGV incarnation, then id, attempt, nonce of each lease
-- Returns the ids whose lease is gone.   Caller: worker, at a third of the lease.   A repeat moves the deadline again.
local function renew(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local deadline = now_ms() + clock.lease_ms
  local gone = {}
  for i = 2, #args, 3 do
    local group = redis.call('HMGET', group_key(clock.prefix, args[i]), 'attempt', 'nonce')
    if group[1] == args[i + 1] and group[2] == args[i + 2] then
      redis.call('ZADD', clock.prefix .. 'running', 'XX', deadline, args[i])
    else
      gone[#gone + 1] = tonumber(args[i])
    end
  end
  return gone
end
