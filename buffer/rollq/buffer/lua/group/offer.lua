-- Offers samples of leased groups to workers that have less to do, takes offers back, and says which are lent. A sample
-- that is neither offered nor lent any more is its worker's again. Loans that have run out end.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, then per group: id, attempt, nonce, number, added, taken_back
--   number: how many calls before this one have offered samples of this lease, or have taken some back
--   added, taken_back: indices of samples, 'index,index'
-- Returns: per group: held 0|1, the samples that are offered now, those that are lent, how many parts of its samples
--   were salvaged; 0 when the lease is gone
-- Caller: Lending.offer; workers that others could help
-- Repeat: finds that a call with this number was there, and changes no offer
local function check_indices(clock, text)
  check_given(text)
  for _, index in ipairs(split(text)) do
    check_counts(index)
    if tonumber(index) >= clock.group_size then refuse_argument(index, 'the index of a sample') end
  end
end

-- Drops the loans that have run out; returns the indices of the samples of the others.
local function check_loans(clock, key, lent, now)
  local all, left, indices = loans.read(lent), {}, {}
  for _, loan in ipairs(all) do
    if is_ahead(loan.until_ms, clock.lease_ms, now) then
      left[#left + 1], indices[#indices + 1] = loan, loan.indices
    end
  end
  if #left < #all then loans.write(key, left) end
  return table.concat(indices, ',')
end

local function change_offer(clock, id, offered, added, taken_back)
  local indices = {}
  for _, index in ipairs(split(offered)) do
    if not loans.has_index(taken_back, index) then indices[#indices + 1] = index end
  end
  for _, index in ipairs(split(added)) do
    if not loans.has_index(offered, index) then indices[#indices + 1] = index end
  end
  loans.write_offered(clock, id, indices)
  return table.concat(indices, ',')
end

local function offer_samples(clock, args, at, now)
  local id, attempt, nonce, number, added, taken_back = unpack(args, at, at + 5)
  local key = group_key(clock.prefix, id)
  local live_attempt, live_nonce, offered, calls, lent, parts =
    fields(key, 'attempt', 'nonce', 'offered', 'offer_calls', 'loans', 'parts')
  if live_attempt ~= attempt or live_nonce ~= nonce then return { 0, '', '', 0 } end
  offered = offered or ''
  if tonumber(number) == tonumber(calls or '0') and added .. taken_back ~= '' then
    offered = change_offer(clock, id, offered, added, taken_back)
    redis.call('HSET', key, 'offer_calls', number + 1)
  end
  return { 1, offered, check_loans(clock, key, lent, now), tonumber(parts or '0') }
end

local function offer(keys, args)
  local incarnation = unpack(args, 1, 1)
  check_rows(args, 2, 6)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  for at = 2, #args, 6 do
    check_given(args[at], args[at + 1], args[at + 2])
    check_counts(args[at + 3])
    check_indices(clock, args[at + 4])
    check_indices(clock, args[at + 5])
  end
  local replies, now, is_offered = {}, now_ms(), false
  for at = 2, #args, 6 do
    replies[#replies + 1] = offer_samples(clock, args, at, now)
    is_offered = is_offered or args[at + 4] ~= ''
  end
  if is_offered then wake(clock, EVENT.lend) end
  return replies
end
