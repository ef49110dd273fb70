-- Drops leased groups whose prompt has too many tokens, and remembers its row, so that no producer admits it again. A
-- group that a batch waits for fails instead.
-- Moves: running -> dropped, or failed
-- KEYS: clock
-- ARGV: incarnation, error_text, tokens, then per lease: id, attempt, nonce
--   tokens: of the prompt
-- Returns: how many moved
-- Caller: Leasing.drop_too_long; workers
-- Repeat: finds that the nonce is cleared, and moves nothing
local FIRST_LEASE = 4

local function drop_too_long(keys, args)
  local incarnation, error_text, tokens = unpack(args, 1, FIRST_LEASE - 1)
  check_given(error_text)
  check_counts(tokens)
  check_rows(args, FIRST_LEASE, 3)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local moved, now = 0, exact(now_ms())
  for at = FIRST_LEASE, #args, 3 do
    local id, attempt, nonce = unpack(args, at, at + 2)
    local key = group_key(clock.prefix, id)
    local live_attempt, live_nonce, batch, row = fields(key, 'attempt', 'nonce', 'batch', 'row')
    if live_attempt == attempt and live_nonce == nonce then
      withdraw(clock, id, 'running')
      if row and tonumber(id) >= first_of_prompts(clock) then
        local too_long = clock.prefix .. 'too_long'
        redis.call('HSET', too_long, row, tokens)
        redis.call('HSET', clock.prefix .. 'progress', 'rows_too_long', redis.call('HLEN', too_long))
      end
      if batch then
        note_lease(key, 'error', now)
        file_for_audit(clock, id, 'failed', error_text)
      else
        drop_group(clock, id, 'too_long')
      end
      moved = moved + 1
    end
  end
  if moved > 0 then wake(clock, EVENT.admit) end
  return moved
end
