-- Keeps calls that agents have made, each as a part of its sample, before they are answered: what an agent has seen is
-- then there for the next attempt. A call that is not recorded is never answered, so this also runs on a full server.
-- Moves: nothing
-- KEYS: clock
-- ARGV: as those of `salvage`
-- Returns: as `salvage` does
-- Caller: Leasing.record; workers, after each call of an agent
-- Repeat: finds that parts with these numbers are there, and changes nothing
local function record(keys, args)
  return keep_parts(keys, args)
end
