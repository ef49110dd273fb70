-- After a rewind to step s the tokens of dead versions count as min(version, s): corrects the version index, and the groups
-- that are to enter it.
-- KEYS[1] clock   ARGV incarnation, epoch, nonce, from_step, limit
-- Returns more 0|1: call again.   Caller: trainer, every rank, after rewind.   Idempotent by state.
local function clamp(keys, args)
  local clock, err = read_clock_as_trainer(keys[1], args[1], args[2], args[3])
  if err then return err end
  local from_step, limit = tonumber(args[4]), tonumber(args[5])
  if clock.version ~= from_step then return 0 end -- newer weights are live, and their tokens are no dead ones
  local ids = redis.call('ZRANGEBYSCORE', clock.prefix .. 'by_version', stale_bound(from_step + clock.token_shift), '(' .. stale_bound(NO_TOKENS - 1),
    'LIMIT', 0, limit)
  for _, id in ipairs(ids) do
    local group = redis.call('HMGET', group_key(clock.prefix, id), 'status', 'arrival')
    file_result(clock, id, group[1], cap_versions(clock, id, from_step), tonumber(group[2]))
  end
  if #ids == limit then return 1 end
  for _, status in ipairs({ 'gathered', 'cooling' }) do
    for _, id in ipairs(redis.call('ZRANGE', clock.prefix .. status, 0, -1)) do cap_versions(clock, id, from_step) end
  end
  return 0
end
