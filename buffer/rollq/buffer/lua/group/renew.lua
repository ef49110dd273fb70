-- Moves the deadline of leases. The first call for a lease confirms that its worker has it: only then does its end
-- count as a death.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, then per lease: id, attempt, nonce
-- Returns: the ids whose lease is gone
-- Caller: Leasing.renew; workers, as soon as they have leased groups, then every third of a lease
-- Repeat: moves the deadline again
local function renew(keys, args)
  local incarnation = unpack(args, 1, 1)
  check_rows(args, 2, 3)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local deadline = now_ms() + clock.lease_ms
  local gone = {}
  for at = 2, #args, 3 do
    local id, attempt, nonce = unpack(args, at, at + 2)
    local live_attempt, live_nonce = group_fields(clock, id, 'attempt', 'nonce')
    if live_attempt == attempt and live_nonce == nonce then
      redis.call('HSET', group_key(clock.prefix, id), 'confirmed', 1)
      redis.call('ZADD', clock.prefix .. 'running', 'XX', deadline, id)
    else
      gone[#gone + 1] = tonumber(id)
    end
  end
  return gone
end
