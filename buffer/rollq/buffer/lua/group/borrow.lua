-- Lends a worker that has less to do samples that other workers offer, until a deadline.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, worker, nonce, epoch, version, want, share
--   epoch, version: of the worker's weights   want: samples that it has places for   share: the part of what is offered
--   that it may take in one call, from 0 to 1
-- Returns: per group: what `lease` returns of it, and the indices of its samples that are lent
-- Caller: Lending.borrow; workers that have nothing to lease
-- Repeat: with the same nonce returns the same samples, of those groups whose loan has not ended
--
-- The weights must be at least as new as those that the group's worker leased it for, so its tokens count as no older.
-- The oldest groups come first.
local LOOKED_AT = 32 -- groups

local UNCONFIRMED_MS = 5000 -- longest life of a loan before its worker renews it

local function lend_samples(clock, id, request, most)
  local key = group_key(clock.prefix, id)
  local offered, lent = fields(key, 'offered', 'loans')
  local taken, left = {}, {}
  for _, index in ipairs(split(offered or '')) do
    local list = #taken < most and taken or left
    list[#list + 1] = index
  end
  local all = loans.read(lent)
  -- stylua: ignore
  all[#all + 1] = {
    nonce = request.nonce, until_ms = request.until_ms, parts = 0, indices = table.concat(taken, ','),
  }
  loans.write(key, all)
  loans.write_offered(clock, id, left)
  return #taken
end

-- The groups whose samples this worker may take: their ids, and how many samples they offer in all.
local function find_offers(clock, request)
  local ids, count = {}, 0
  for _, id in ipairs(redis.call('ZRANGE', clock.prefix .. 'offers', 0, LOOKED_AT - 1)) do
    local worker, offered = group_fields(clock, id, 'worker', 'offered')
    local needed = tonumber(redis.call('ZSCORE', clock.prefix .. 'generating', id))
    if worker ~= request.worker and needed and request.version >= needed then
      ids[#ids + 1], count = id, count + #split(offered or '')
    end
  end
  return ids, count
end

-- Whether none of these samples has tokens yet: then the group, which may be large, need not be read.
local function are_new(letters, indices)
  for _, index in ipairs(split(indices)) do
    if string.sub(letters, index + 1, index + 1) ~= SAMPLE.pending then return false end
  end
  return true
end

local function describe_loans(clock, ids, nonce)
  local reply = {}
  for _, id in ipairs(ids) do
    local lent, letters = group_fields(clock, id, 'loans', 'letters')
    local loan = loans.find(loans.read(lent), nonce)
    if loan then
      local described = describe_lease_of(clock, id, are_new(letters, loan.indices))
      described[#described + 1] = loan.indices
      reply[#reply + 1] = described
    end
  end
  return reply
end

local function borrow(keys, args)
  local incarnation, worker, nonce, epoch, version, want, share = unpack(args)
  check_given(worker, nonce)
  check_whole(epoch, version)
  check_counts(want)
  check_numbers(share)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local grant_key = clock.prefix .. 'grant:' .. nonce
  local granted = redis.call('GET', grant_key)
  if granted then return describe_loans(clock, split(granted), nonce) end
  local runs = clock.control == 'run' or clock.control == 'done'
  if not runs or clock.sleep or clock.kind ~= 'train' then return {} end
  version = math.min(tonumber(version), newest_of(clock, tonumber(epoch)))
  local until_ms = now_ms() + math.min(clock.lease_ms, UNCONFIRMED_MS)
  local request = { worker = worker, nonce = nonce, version = version, until_ms = until_ms }
  local ids, offered = find_offers(clock, request)
  local most, taken, lent = math.min(tonumber(want), math.ceil(offered * tonumber(share))), 0, {}
  for _, id in ipairs(ids) do
    if taken >= most then break end
    taken = taken + lend_samples(clock, id, request, most - taken)
    lent[#lent + 1] = id
  end
  if taken == 0 then return {} end
  redis.call('HINCRBY', clock.prefix .. 'progress', 'lent', taken)
  redis.call('SET', grant_key, table.concat(lent, ','), 'PX', clock.lease_ms)
  return describe_loans(clock, lent, nonce)
end
