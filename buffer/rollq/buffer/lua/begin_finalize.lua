-- running -> finalizing: one process takes a batch to run its pipeline; others wait for what it makes of it.
-- KEYS[1] clock   ARGV incarnation, handle, caller's nonce, milliseconds that it may take
-- Returns the state ('finalizing': it is the caller's; 'busy': another's), the result when there is one, and per group that
-- is gathered: id, the version it counts as, arrival, tries, tokens, reward.
-- Caller: coordinator.   A repeat by the same caller returns the same; one that died is replaced when its time is over.
local function begin_finalize(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local batch, now = clock.prefix .. 'batch:' .. args[2], now_ms()
  local found = redis.call('HMGET', batch, 'state', 'owner', 'owned_until_ms', 'result')
  if found[1] ~= 'running' and found[1] ~= 'finalizing' then return { found[1] or 'gone', found[4] or '' } end
  if found[1] == 'finalizing' and found[2] ~= args[3] and tonumber(found[3]) > now then return { 'busy', '' } end
  redis.call('HSET', batch, 'state', 'finalizing', 'owner', args[3], 'owned_until_ms', now + tonumber(args[4]))
  local reply = { 'finalizing', '' }
  for _, id in ipairs(redis.call('LRANGE', batch .. ':groups', 0, -1)) do
    local group = redis.call('HMGET', group_key(clock.prefix, id), 'status', 'oldest', 'arrival', 'tries', 'tokens', 'reward')
    if group[1] == 'gathered' then
      reply[#reply + 1] = { tonumber(id), tonumber(group[2]), tonumber(group[3]), tonumber(group[4]), tonumber(group[5]), group[6] }
    end
  end
  return reply
end
