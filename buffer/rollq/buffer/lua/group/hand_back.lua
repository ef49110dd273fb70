-- A worker gives leased groups back: work that it did not start, or that failed in the engine.
-- Moves: running -> pending; failed, when the error was counted and the tries are spent; aborted, when its batch is
--   cut off
-- KEYS: clock
-- ARGV: incarnation, counted, error_text, then per lease: id, attempt, nonce
--   counted: 1 when the try was spent   error_text: '' without an error
-- Returns: how many moved
-- Caller: Leasing.hand_back; workers
-- Repeat: finds that the nonce is cleared, and moves nothing
local FIRST_LEASE = 4

local function hand_back(keys, args)
  local incarnation, counted, error_text = unpack(args, 1, FIRST_LEASE - 1)
  check_choice(counted, '0', '1')
  check_given(error_text)
  check_rows(args, FIRST_LEASE, 3)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local moved, failed, now = 0, 0, exact(now_ms())
  for at = FIRST_LEASE, #args, 3 do
    local id, attempt, nonce = unpack(args, at, at + 2)
    local key = group_key(clock.prefix, id)
    local live_attempt, live_nonce, tries, deaths, batch, evaluation =
      fields(key, 'attempt', 'nonce', 'tries', 'deaths', 'batch', 'eval')
    if live_attempt == attempt and live_nonce == nonce then
      withdraw(clock, id, 'running')
      note_lease(key, counted == '1' and 'error' or 'handed_back', now)
      if error_text ~= '' then
        redis.call('HSET', key, 'error', error_text)
        note_error(clock, error_text)
      end
      if counted == '1' and tonumber(tries) >= clock.max_tries then
        file_for_audit(clock, id, 'failed', error_text)
        failed = failed + 1
      else
        age_group(clock, id, stale_version(clock, clock.step))
        if counted ~= '1' then redis.call('HINCRBY', key, 'tries', -1) end
        make_pending(clock, id, tonumber(deaths))
        if evaluation ~= '1' and is_cut_off(clock, batch) then
          note_left(clock, id, batch)
          leave_batch(clock, id)
        end
      end
      moved = moved + 1
    end
  end
  note_failures(clock, failed, false)
  if moved > 0 then wake(clock, EVENT.admit) end
  return moved
end
