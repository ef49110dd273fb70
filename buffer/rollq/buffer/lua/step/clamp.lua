-- After a rewind to `from_step`, tokens of dead versions count as min(version, from_step): corrects the version index,
-- and the groups that will enter it.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, from_step, limit
-- Returns: more 0|1: call again
-- Caller: Training.begin_epoch; the trainer, rank 0, after rewind
-- Repeat: changes nothing
local function clamp(keys, args)
  local incarnation, epoch, nonce, from_step, limit = unpack(args)
  local clock, err = read_clock_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  from_step, limit = tonumber(from_step), tonumber(limit)
  if clock.version ~= from_step then return 0 end -- newer weights are live, and their tokens are not dead
  local too_new, no_tokens = stale_bound(from_step + clock.token_shift), '(' .. stale_bound(NO_TOKENS - 1)
  local ids = redis.call('ZRANGEBYSCORE', clock.prefix .. 'by_version', too_new, no_tokens, 'LIMIT', 0, limit)
  for _, id in ipairs(ids) do
    local status, arrival = group_fields(clock, id, 'status', 'arrival')
    file_result(clock, id, status, cap_versions(clock, id, from_step), tonumber(arrival))
  end
  if #ids == limit then return 1 end
  for _, status in ipairs({ 'gathered', 'cooling' }) do
    for _, id in ipairs(redis.call('ZRANGE', clock.prefix .. status, 0, -1)) do
      cap_versions(clock, id, from_step)
    end
  end
  return 0
end
