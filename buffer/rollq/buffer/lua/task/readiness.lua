-- Counts the groups that a claim of a step would find.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, step
-- Returns: how many groups are ready, with those that an open batch has already, how many in generation must be waited
--   for, how many must reach the archive first
-- Caller: Claiming.readiness; the trainer, any rank
-- Repeat: only reads
local function readiness(keys, args)
  local incarnation, step = unpack(args)
  check_whole(step)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  step = tonumber(step)
  local ready, stragglers = count_ready(clock, step)
  local manifest = manifest_key(clock, step)
  if open_target(manifest) then ready = ready + #manifest_ids(manifest) end
  return { ready, stragglers, count_unarchived(clock, step) }
end
