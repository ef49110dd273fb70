-- Corrects the version index after floors of dead epochs have moved: groups count as older, or as newer again.
-- `oldest_now` corrects other groups when they return to the index.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, after, limit
--   after: the score in the index up to which groups were corrected before, '-inf' in the first call
-- Returns: `after` of the next call, or '' when all are corrected
-- Caller: Training._recount; the trainer, rank 0, after rewind and after task_publish
-- Repeat: changes nothing
local function recount(keys, args)
  local incarnation, epoch, nonce, after, limit = unpack(args)
  if after ~= '-inf' then check_numbers(after) end
  check_counts(limit)
  local clock, err = read_clock_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  local by_version, last = clock.prefix .. 'by_version', '(' .. stale_bound(NO_TOKENS - 1)
  local from = after == '-inf' and after or '(' .. after
  local found = redis.call('ZRANGEBYSCORE', by_version, from, last, 'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #found, 2 do
    local id, score = found[i], tonumber(found[i + 1])
    local status, arrival, counted = group_fields(clock, id, 'status', 'arrival', 'oldest')
    local oldest = counted and oldest_now(clock, id) -- none only if the group was changed by hand
    -- groups whose score rises are met again later
    if oldest and version_score(oldest, tonumber(arrival)) ~= score then
      file_result(clock, id, status, oldest, tonumber(arrival))
    end
  end
  return #found == 2 * limit and exact(found[#found]) or ''
end
