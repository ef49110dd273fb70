-- One chunk of weights into Redis (the first is their manifest); the first one also names them as the newest of those that are held.
-- KEYS[1] run hash   ARGV incarnation, digest, chunks in all, number of this one from 0, seconds to live, its bytes
-- Returns the entries held ("digest/chunks"), oldest first.   Caller: trainer, rank 0.   A repeat overwrites.
-- A function, so that a full server still takes weights: without them nothing would drain it.
local function store_weights(keys, args)
  local prefix, err = read_run(keys[1], args[1])
  if err then return err end
  local held, entry = prefix .. 'weights', args[2] .. '/' .. args[3]
  if args[4] == '0' then
    -- listed before it is written, so that what a crash leaves half written is dropped in its turn
    redis.call('LREM', held, 0, entry)
    redis.call('RPUSH', held, entry)
  end
  redis.call('SET', held .. ':' .. args[2] .. ':' .. args[4], args[6], 'EX', args[5])
  return redis.call('LRANGE', held, 0, -1)
end
