-- Ends a batch without a result (running|finalizing -> aborted). Unfinished groups are dropped; their workers learn of
-- it when they renew their leases, or put.
-- Moves: gathered -> completed, for finished groups that are kept; else pending|running|gathered -> dropped
-- KEYS: clock
-- ARGV: incarnation, handle, reason, keep_finished
--   keep_finished: 1 to keep finished groups, of a batch that is trained
-- Returns: how many groups were dropped
-- Caller: Coordination.abort_batch; coordinators
-- Repeat: finds it aborted; a finalized batch stays finalized
local function abort_batch(keys, args)
  local incarnation, handle, reason, keep_finished = unpack(args)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local state, kind = fields(batch_key(clock, handle), 'state', 'type')
  if state ~= 'running' and state ~= 'finalizing' then return 0 end
  local keeps, dropped = keep_finished == '1' and kind == 'train', 0
  for _, id in ipairs(batch_ids(clock, handle)) do
    local batch, status, oldest, arrival = group_fields(clock, id, 'batch', 'status', 'oldest', 'arrival')
    local finished = batch == handle and status == 'gathered'
    if finished and keeps then
      withdraw(clock, id, status)
      redis.call('HDEL', group_key(clock.prefix, id), 'batch')
      file_result(clock, id, 'completed', tonumber(oldest), tonumber(arrival))
    elseif finished or (batch == handle and is_unfinished(status)) then
      withdraw(clock, id, status)
      drop_group(clock, id, 'cancelled')
      dropped = dropped + 1
    end
  end
  end_batch(clock, handle, 'aborted', reason)
  return dropped
end
