-- Keeps what is there until a copy of it is on disk: no checkpoint, fresh commit or sweep drops or resets groups.
-- KEYS[1] clock   ARGV incarnation, milliseconds from now on (0: the copy is done)
-- Returns 1 when the last hold was still in force, else 0.   Caller: whoever saves, again and again while it does.   A repeat only moves the deadline.
local function hold_for_saving(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local hold_ms, now = tonumber(args[2]), now_ms()
  redis.call('HSET', keys[1], 'saving_until_ms', hold_ms > 0 and now + hold_ms or 0)
  return clock.saving_until_ms >= now and 1 or 0
end
