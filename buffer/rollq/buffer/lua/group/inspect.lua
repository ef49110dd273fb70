-- One group without its payload.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, id
-- Returns: the group's hash, flat, with versions as they count now; empty when there is no such group
-- Caller: Inspection.inspect; monitors
-- Repeat: only reads
local function inspect(keys, args)
  local incarnation, id = unpack(args)
  check_given(id)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  return fields_as_counted(clock, id)
end
