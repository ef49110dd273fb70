-- New prompts -> pending, as many as the target leaves room for; the dataset's cursor moves with them.
-- KEYS[1] clock   ARGV incarnation, epoch, cursor, target, step, then cursor after it, row or '', prompt of each
-- Returns how many were admitted, the first group id, the cursor now.
-- Caller: producer.   A repeat finds the cursor moved and admits nothing.
local function admit(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local progress = clock.prefix .. 'progress'
  local cursor = tonumber(redis.call('HGET', progress, 'cursor') or '0')
  if clock.epoch ~= tonumber(args[2]) or cursor ~= tonumber(args[3]) or clock.control ~= 'run' or clock.sleep then
    return { 0, 0, cursor }
  end
  local count = math.min((#args - 5) / 3, tonumber(args[4]) - scheduled(clock))
  if count <= 0 then return { 0, 0, cursor } end
  local step, now = tonumber(args[5]), now_ms()
  local first = redis.call('HINCRBY', progress, 'admitted', count) - count + 1
  for i = 0, count - 1 do
    local at = 6 + 3 * i
    cursor = tonumber(args[at])
    create_group(clock, first + i, step, 0, now, false, args[at + 2])
    if args[at + 1] ~= '' then redis.call('HSET', group_key(clock.prefix, first + i), 'row', args[at + 1]) end
  end
  redis.call('HSET', progress, 'cursor', cursor)
  redis.call('PUBLISH', clock.events, 'admit')
  return { count, first, cursor }
end
