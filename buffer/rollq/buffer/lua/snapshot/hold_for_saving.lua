-- Keeps every group while the buffer is saved: no checkpoint, fresh commit or sweep drops or resets it.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, save_id, hold_ms
--   hold_ms: from now, 0 when the copy is complete
-- Returns: 1 when the last hold was still in force, else 0
-- Caller: Saving._hold; a save, repeatedly while it lasts
-- Repeat: moves the deadline again; once its save has ended, changes nothing
local function hold_for_saving(keys, args)
  local incarnation, save_id, hold_ms = unpack(args)
  check_given(save_id)
  check_counts(hold_ms)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  hold_ms = tonumber(hold_ms)
  local now = now_ms()
  if clock.saved_by == save_id then return 0 end
  local was_held = is_saving(clock, now)
  if hold_ms > 0 then
    write_clock(clock, { saving_until_ms = now + hold_ms, saving_ms = hold_ms, saver = save_id })
  elseif clock.saver == save_id then
    write_clock(clock, { saving_until_ms = 0, saved_by = save_id })
  end
  return was_held and 1 or 0
end
