-- Ends loans of samples: the samples are finished, or the borrower stops. Their salvaged parts stay with their group.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, then per loan: id, attempt, nonce
-- Returns: how many ended
-- Caller: Lending.end_loans; workers
-- Repeat: finds no loan with this nonce, and ends nothing
local function end_loan(keys, args)
  local incarnation = unpack(args, 1, 1)
  check_rows(args, 2, 3)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local ended = 0
  for at = 2, #args, 3 do
    local id, attempt, nonce = unpack(args, at, at + 2)
    local live_attempt, lent = group_fields(clock, id, 'attempt', 'loans')
    local all = loans.read(lent)
    local loan = live_attempt == attempt and loans.find(all, nonce)
    if loan then
      loan.indices = ''
      loans.write(group_key(clock.prefix, id), all)
      ended = ended + 1
    end
  end
  if ended > 0 then wake(clock, EVENT.returned) end
  return ended
end
