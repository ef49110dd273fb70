-- Makes a version the live one for a task: groups that it makes too old stop counting at once.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, epoch, nonce, version
-- Returns: the step that is trained next
-- Caller: Training.publish; the trainer, rank 0
-- Repeat: changes nothing
local function task_publish(keys, args)
  local incarnation, epoch, nonce, version = unpack(args)
  check_whole(version)
  local clock, err = read_clock_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  version = tonumber(version)
  local step = math.max(clock.step, version + 1)
  write_clock(clock, { version = math.max(clock.version, version), step = step })
  wake(clock, EVENT.publish)
  return step
end
