-- Samples of a running group that its worker offers to other workers, and loans of such samples. All of them end with
-- the lease of the group, and `put` accepts the group's result only from the worker that has this lease.
--
-- The group's field `offered` has the indices of the samples that are offered, and `loans` a line for each loan: its
-- nonce, until when it holds (ms), how many parts were salvaged with it, and the indices of its samples. `loan_parts`
-- has how many parts were salvaged with any loan. The sorted set `offers` has the groups that offer samples.
local loans = {}

-- The loans of a group by its field `loans`.
function loans.read(text)
  local list = {}
  for nonce, until_ms, parts, indices in string.gmatch(text or '', '(%S+) (%d+) (%d+) ([%d,]+)') do
    list[#list + 1] = { nonce = nonce, until_ms = tonumber(until_ms), parts = tonumber(parts), indices = indices }
  end
  return list
end

-- Stores the loans of a group that have samples.
function loans.write(key, list)
  local lines = {}
  for _, loan in ipairs(list) do
    if loan.indices ~= '' then
      lines[#lines + 1] = table.concat({ loan.nonce, exact(loan.until_ms), exact(loan.parts), loan.indices }, ' ')
    end
  end
  if #lines > 0 then
    redis.call('HSET', key, 'loans', table.concat(lines, '\n'))
  else
    redis.call('HDEL', key, 'loans')
  end
end

-- The loan with this nonce; nil if there is none.
function loans.find(list, nonce)
  for _, loan in ipairs(list) do
    if loan.nonce == nonce then return loan end
  end
end

-- Whether `index` is among `indices`, 'index,index'.
function loans.has_index(indices, index)
  return string.find(',' .. indices .. ',', ',' .. exact(index) .. ',', 1, true) ~= nil
end

-- Stores which samples of a group are offered.
function loans.write_offered(clock, id, indices)
  local key = group_key(clock.prefix, id)
  if #indices == 0 then
    redis.call('HDEL', key, 'offered')
    redis.call('ZREM', clock.prefix .. 'offers', id)
  else
    redis.call('HSET', key, 'offered', table.concat(indices, ','))
    redis.call('ZADD', clock.prefix .. 'offers', redis.call('HGET', key, 'arrival'), id)
  end
end
