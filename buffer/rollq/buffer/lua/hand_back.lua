-- running -> pending, by the worker itself: unstarted work (not counted as a try), or an engine's error (counted; the
-- group fails when its tries are spent).
-- KEYS[1] clock   ARGV incarnation, counted 0|1, error, then id, attempt, nonce of each lease
-- Returns how many moved.   Caller: worker.   A repeat finds the nonce cleared and moves nothing.
local function hand_back(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local counted, moved = args[2] == '1', 0
  for i = 4, #args, 3 do
    local id = args[i]
    local key = group_key(clock.prefix, id)
    local group = redis.call('HMGET', key, 'attempt', 'nonce', 'tries', 'deaths')
    if group[1] == args[i + 1] and group[2] == args[i + 2] then
      end_lease(clock, id)
      if args[3] ~= '' then redis.call('HSET', key, 'error', args[3]) end
      if counted and tonumber(group[3]) >= clock.max_tries then
        file_for_audit(clock, id, 'failed', args[3])
      else
        if not counted then redis.call('HINCRBY', key, 'tries', -1) end
        make_pending(clock, id, tonumber(group[4]))
      end
      moved = moved + 1
    end
  end
  if moved > 0 then redis.call('PUBLISH', clock.events, 'admit') end
  return moved
end
