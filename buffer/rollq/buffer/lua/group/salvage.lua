-- Keeps tokens of samples that are still being made: if their worker dies, the next attempt continues from them.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, then per part: id, attempt, nonce, number, index, letter, version, token_version, begins, part
--   number: how many parts of its group came before it   index: of its sample   letter: of its sample so far
--   version: the version that the part counts as, '-' without tokens   token_version: the version of its oldest token
--   begins: 1 when the part is the sample from its first token
-- Returns: one word per part: `kept`; `full` when its group has MOST_PARTS parts, or would have more than
--   MOST_PART_BYTES of them; or `refused`
-- Caller: Leasing.salvage; workers, whenever samples have enough new tokens
-- Repeat: finds that parts with these numbers are there, and changes nothing
local function salvage(keys, args)
  local incarnation = unpack(args, 1, 1)
  check_rows(args, FIRST_PART, PART_ARGS)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  return keep_parts(clock, args)
end
