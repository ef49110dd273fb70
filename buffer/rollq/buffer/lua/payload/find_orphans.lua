-- Finds orphans among external payloads: no group names them, and no lease may yet put them.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, then names of payloads
-- Returns: the names of the orphans; none while the buffer is being saved
-- Caller: Collecting.find_orphans; any role
-- Repeat: finds the same
--
-- It writes nothing, but is called as a function that writes: the facts behind its reply are then on a replica before a
-- payload is removed.
local function find_orphans(keys, args)
  local incarnation = unpack(args, 1, 1)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local orphans = {}
  if is_saving(clock, now_ms()) then return orphans end
  for i = 2, #args do
    if not string.find(args[i], AWAY_NAME) then refuse_argument(args[i], 'the name of a payload') end
    if not is_alive(clock, args[i]) then orphans[#orphans + 1] = args[i] end
  end
  return orphans
end
