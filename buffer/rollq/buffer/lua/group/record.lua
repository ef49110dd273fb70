-- Keeps calls that agents have made, each as a part of its sample, before they are answered: the next attempt then has
-- everything that an agent has seen. A call that is not recorded is never answered, so this also runs on a full server.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, then per part: id, attempt, nonce, number, index, letter, version, token_version, begins, part
--   number, index, letter, version, token_version, begins: see `salvage`
-- Returns: one word per part, as `salvage` does
-- Caller: Leasing.record; workers, after each call of an agent
-- Repeat: finds that parts with these numbers are there, and changes nothing
local function record(keys, args)
  local incarnation = unpack(args, 1, 1)
  check_rows(args, FIRST_PART, PART_ARGS)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  return keep_parts(clock, args)
end
