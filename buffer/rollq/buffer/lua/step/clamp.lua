-- After a rewind to `from_step`, tokens of dead versions count as min(version, from_step): corrects the version index,
-- and then groups that cool. Others are corrected when they return to the index, by `oldest_now`.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, from_step, limit, offset
--   offset: how many groups that cool were corrected before
-- Returns: the offset of the next call, or -1 when all are corrected
-- Caller: Training.begin_epoch; the trainer, rank 0, after rewind
-- Repeat: changes nothing
local function clamp(keys, args)
  local incarnation, epoch, nonce, from_step, limit, offset = unpack(args)
  check_whole(from_step)
  check_counts(limit, offset)
  local clock, err = read_clock_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  from_step, limit, offset = tonumber(from_step), tonumber(limit), tonumber(offset)
  if clock.version ~= from_step then return -1 end -- newer weights are live, and their tokens are not dead
  local too_new, no_tokens = stale_bound(from_step + clock.token_shift), '(' .. stale_bound(NO_TOKENS - 1)
  local ids = redis.call('ZRANGEBYSCORE', clock.prefix .. 'by_version', too_new, no_tokens, 'LIMIT', 0, limit)
  for _, id in ipairs(ids) do
    local status, arrival = group_fields(clock, id, 'status', 'arrival')
    file_result(clock, id, status, cap_versions(clock, id, from_step), tonumber(arrival))
  end
  if #ids == limit then return offset end
  local cooling = redis.call('ZRANGE', clock.prefix .. 'cooling', offset, offset + limit - 1)
  for _, id in ipairs(cooling) do
    cap_versions(clock, id, from_step)
  end
  return #cooling == limit and offset + limit or -1
end
