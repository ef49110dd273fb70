-- What a snapshot is of: clock, status sets and everything else that is small, of a task, at one instant.
-- KEYS[1] clock   ARGV incarnation, then the names of the statuses
-- Returns the clock (flat hash), a list of key's last part, hash|list, content, and per status id, score, ...
-- Caller: Buffer.save.   Read only.
-- The only function that reads whole sets, since all must be of one instant: 10,000 groups take about 5 ms.
local function save_index(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local parts = {}
  local function add(name, kind)
    local content = redis.call(kind == 'hash' and 'HGETALL' or 'LRANGE', clock.prefix .. name, unpack(kind == 'hash' and {} or { 0, -1 }))
    if #content > 0 then parts[#parts + 1] = { name, kind, content } end
    return content
  end
  add('progress', 'hash')
  add('outcomes', 'list')
  for step = clock.history, clock.claimed_step do add('manifest:' .. step, 'hash') end
  add('batches_over', 'list')
  local batches = add('batches', 'hash')
  for i = 2, #batches, 2 do
    add('batch:' .. batches[i], 'hash')
    add('batch:' .. batches[i] .. ':groups', 'list')
  end
  local reply = { redis.call('HGETALL', keys[1]), parts }
  for i = 2, #args do
    reply[#reply + 1] = redis.call('ZRANGE', clock.prefix .. args[i], 0, -1, 'WITHSCORES')
  end
  return reply
end
