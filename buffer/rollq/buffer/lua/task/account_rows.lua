-- Counts the rows of a task's prompts that have been read, and how many of them are unusable, each row once.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, account, rows, passed, then per unusable row: row, reason, place
--   account: of the file and of how its rows are read; a different one starts the counts again   passed: the cursor
--   after the rows that have been read   place: of the row in its file
-- Returns: how many rows are newly known to be unusable
-- Caller: Admission.account_rows; producers
-- Repeat: finds these rows counted, and changes nothing
local FIRST_ROW = 5
local MOST_REASONS = 8 -- that are counted separately
local OTHER_REASONS = 'other reasons'

-- Another file, or rows that are read in another way: what was counted says nothing about them.
local function begin_account(clock, account)
  local cursor = redis.call('HGET', clock.prefix .. 'progress', 'cursor') or '0'
  redis.call('UNLINK', clock.prefix .. 'unusable', clock.prefix .. 'unusable_rows')
  redis.call('HDEL', clock.prefix .. 'progress', 'rows_read', 'rows_unusable')
  redis.call('HSET', clock.prefix .. 'prompt_file', 'account', account, 'from', cursor)
end

local function count_reason(clock, reason, place)
  local key = clock.prefix .. 'unusable'
  local known = redis.call('HGET', key, reason)
  if not known and redis.call('HLEN', key) >= MOST_REASONS then
    reason = OTHER_REASONS
    known = redis.call('HGET', key, reason)
  end
  local count, first = string.match(known or '', '^(%d+) (.*)$')
  redis.call('HSET', key, reason, exact((tonumber(count) or 0) + 1) .. ' ' .. (first or place))
end

local function account_rows(keys, args)
  local incarnation, account, rows, passed = unpack(args, 1, FIRST_ROW - 1)
  check_given(account)
  check_counts(rows, passed)
  check_rows(args, FIRST_ROW, 3)
  for at = FIRST_ROW, #args, 3 do
    check_counts(args[at])
  end
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local file, progress = clock.prefix .. 'prompt_file', clock.prefix .. 'progress'
  if redis.call('HGET', file, 'account') ~= account then begin_account(clock, account) end
  local known = tonumber(redis.call('HGET', progress, 'rows_read') or '0')
  local read = math.min(tonumber(rows), tonumber(passed) - tonumber(redis.call('HGET', file, 'from')))
  redis.call('HSET', progress, 'rows', rows, 'rows_read', exact(math.max(known, read)))
  local new = 0
  for at = FIRST_ROW, #args, 3 do
    local row, reason, place = unpack(args, at, at + 2)
    if redis.call('HSETNX', clock.prefix .. 'unusable_rows', row, '') == 1 then
      count_reason(clock, reason, place)
      new = new + 1
    end
  end
  if new > 0 then redis.call('HINCRBY', progress, 'rows_unusable', new) end
  return new
end
