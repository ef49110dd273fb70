-- Moves the deadline of leases. The first call for a lease confirms that its worker has it: only then does its end
-- count as a death. Loans of samples are renewed in the same way.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, then per lease or loan: id, attempt, nonce
-- Returns: which of the leases and loans are gone, and which are of a batch that is cut off, by place, from 0
-- Caller: Leasing.renew; workers, as soon as they have leased groups, then every third of a lease
-- Repeat: moves the deadline again

-- Moves the deadline of a loan; returns whether there is such a loan.
local function renew_loan(key, nonce, deadline)
  local lent = loans.read(redis.call('HGET', key, 'loans'))
  local loan = loans.find(lent, nonce)
  if not loan then return false end
  loan.until_ms = deadline
  loans.write(key, lent)
  return true
end

local function renew(keys, args)
  local incarnation = unpack(args, 1, 1)
  check_rows(args, 2, 3)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local deadline = now_ms() + clock.lease_ms
  local gone, cut = {}, {}
  for at = 2, #args, 3 do
    local id, attempt, nonce = unpack(args, at, at + 2)
    local key = group_key(clock.prefix, id)
    local live_attempt, live_nonce, batch = fields(key, 'attempt', 'nonce', 'batch')
    if live_attempt == attempt and live_nonce == nonce then
      redis.call('HSET', key, 'confirmed', 1)
      redis.call('ZADD', clock.prefix .. 'running', 'XX', deadline, id)
      if is_cut_off(clock, batch) then cut[#cut + 1] = (at - 2) / 3 end
    elseif live_attempt ~= attempt or not renew_loan(key, nonce, deadline) then
      gone[#gone + 1] = (at - 2) / 3
    end
  end
  return { gone, cut }
end
