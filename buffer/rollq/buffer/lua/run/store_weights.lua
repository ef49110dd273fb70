-- Stores one chunk of weights. The first chunk, their manifest, lists them as the newest weights on this server.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, digest, chunks, number, ttl_s, chunk
--   chunks: how many there are in all   number: of this one, from 0
-- Returns: the weights held ("digest/chunks"), oldest first
-- Caller: _put; the trainer, rank 0
-- Repeat: writes the same again
--
-- This is a function because a full server must still take weights: without them nothing would ever drain it.
local function store_weights(keys, args)
  local incarnation, digest, chunks, number, ttl_s, chunk = unpack(args)
  check_given(digest, chunk)
  check_counts(chunks, number, ttl_s)
  local prefix, err = read_run(keys[1], incarnation)
  if err then return err end
  local held, entry = prefix .. 'weights', digest .. '/' .. chunks
  if number == '0' then
    -- listed before they are written, so weights that a crash leaves half written are dropped in turn
    redis.call('LREM', held, 0, entry)
    redis.call('RPUSH', held, entry)
  end
  redis.call('SET', held .. ':' .. digest .. ':' .. number, chunk, 'EX', ttl_s)
  return redis.call('LRANGE', held, 0, -1)
end
