-- One entry of the log of a round of weights; the first entry begins another round.
-- KEYS[1] run hash   ARGV incarnation, number of the round (0: another one), seconds to live, entry
-- Returns the round's number.   Caller: trainer, rank 0, and worker.   A repeated entry counts once for readers; a
-- repeated beginning leaves a round that nobody hears of.
local function append_round(keys, args)
  local prefix, err = read_run(keys[1], args[1])
  if err then return err end
  local number = tonumber(args[2])
  if number == 0 then number = redis.call('INCR', prefix .. 'rounds') end
  local log = prefix .. 'round:' .. exact(number)
  redis.call('XADD', log, '*', 'entry', args[4])
  redis.call('EXPIRE', log, args[3])
  return number
end
