-- Appends an entry to the log of a weight broadcast. The first entry begins a new broadcast.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, number, ttl_s, entry
--   number: of the broadcast, 0 for a new one
-- Returns: the broadcast's number
-- Caller: _append; the trainer's rank 0, and workers
-- Repeat: readers count a repeated entry once; a repeated beginning leaves a broadcast that nobody joins
local function append_round(keys, args)
  local incarnation, number, ttl_s, entry = unpack(args)
  check_counts(number, ttl_s)
  check_given(entry)
  local prefix, err = read_run(keys[1], incarnation)
  if err then return err end
  number = tonumber(number)
  if number == 0 then number = redis.call('INCR', prefix .. 'rounds') end
  local log = prefix .. 'round:' .. exact(number)
  redis.call('XADD', log, '*', 'entry', entry)
  redis.call('EXPIRE', log, ttl_s)
  return number
end
