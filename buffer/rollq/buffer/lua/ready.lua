-- What a claim of a step would find.
-- KEYS[1] clock   ARGV incarnation, step
-- Returns how many groups are ready, how many in generation must be waited for.   Caller: trainer, any rank.   Read only.
local function ready(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  return { readiness(clock, tonumber(args[2])) }
end
