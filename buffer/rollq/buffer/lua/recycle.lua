-- aborted, expired -> pending, as many as the target leaves room for, oldest first.
-- KEYS[1] clock   ARGV incarnation, epoch, target, limit, then statuses in the order in which they are drawn on
-- Returns how many moved.   Caller: producer.   A repeat finds less room.
local function recycle(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  if clock.epoch ~= tonumber(args[2]) or clock.control ~= 'run' or clock.sleep then return 0 end
  local room = math.min(tonumber(args[4]), tonumber(args[3]) - scheduled(clock))
  local moved = 0
  for i = 5, #args do
    if moved >= room then break end
    local status = args[i]
    for _, id in ipairs(redis.call('ZRANGE', clock.prefix .. status, 0, room - moved - 1)) do
      local key = group_key(clock.prefix, id)
      unfile_result(clock, id, status)
      if clock.partial == 0 then
        -- without partial rollout an interrupted sample starts again from the prompt
        local letters = redis.call('HGET', key, 'letters')
        for index = 0, #letters - 1 do
          if string.sub(letters, index + 1, index + 1) == 'a' then redis.call('HDEL', rollout_key(clock.prefix, id), index) end
        end
        redis.call('HSET', key, 'letters', (string.gsub(letters, 'a', 'p')))
      end
      redis.call('HSET', key, 'tries', 0) -- a result came of the last one
      make_pending(clock, id, tonumber(redis.call('HGET', key, 'deaths')))
      moved = moved + 1
    end
  end
  if moved > 0 then redis.call('PUBLISH', clock.events, 'admit') end
  return moved
end
