-- Stores the trainer's report of its last step, for monitors, and numbers of a step for curves.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, epoch, nonce, report, curves, step, then pairs
--   report: JSON, '' to leave the last one as it is   curves: the key that takes the numbers: curves or evaluations
--   pairs: name, number; none for a report without a step, which has no row. Those that the row has no room for are
--   left out
-- Returns: 1
-- Caller: Training._report; the trainer, rank 0
-- Repeat: writes the same again. The numbers of a step are put together until a trainer goes back before it
local MOST_REPORT_BYTES = 1048576
local ROWS = HISTORY.by_step
local ROW = '^(%d+) (%d+) (.*)$'

local function position_of(member)
  return tonumber(member and string.match(member, '^(%d+) ') or '0')
end

-- Older rows are kept if their positions, counted from 0, are multiples of this.
local function stride_at(position)
  local stride = 1
  while (position - ROWS.full) / stride > ROWS.thinned do
    stride = stride * 2
  end
  return stride
end

local function is_thinned(member, stride)
  return (position_of(member) - 1) % stride ~= 0
end

-- Removes rows that are older than the newest rows: one with each row, and half of them when the stride grows.
local function thin(key, position)
  local stride = stride_at(position)
  local has_grown = stride ~= stride_at(position - 1)
  local older, removed = redis.call('ZRANGE', key, has_grown and 0 or -ROWS.full - 1, -ROWS.full - 1), {}
  for _, member in ipairs(older) do
    if is_thinned(member, stride) then removed[#removed + 1] = member end
  end
  call_many('ZREM', key, removed)
  redis.call('ZREMRANGEBYRANK', key, 0, -ROWS.full - ROWS.thinned - 1)
end

-- The position and the numbers of a row; a new position and no numbers for a step without one.
local function row_at(key, step)
  local same = redis.call('ZRANGEBYSCORE', key, step, step)[1]
  local position, _, text = string.match(same or '', ROW)
  local is_read, numbers = pcall(cjson.decode, text or '')
  if position and is_read and type(numbers) == 'table' then return tonumber(position), numbers end
  return position_of(redis.call('ZRANGE', key, -1, -1)[1]) + 1, {}
end

-- Puts numbers into a row, as far as they fit. A trainer must not fail over a number that only charts would miss.
local function put_together(numbers, args, first)
  local taken = #cjson.encode(numbers)
  for i = first, #args, 2 do
    local name, number = args[i], tonumber(args[i + 1])
    local before = numbers[name] and #cjson.encode({ [name] = numbers[name] }) - 1 or 0
    local after = taken - before + #cjson.encode({ [name] = number }) - 1
    if after <= ROWS.bytes then
      numbers[name], taken = number, after
    end
  end
end

local function add_numbers(key, step, args, first)
  local position, numbers = row_at(key, step)
  put_together(numbers, args, first)
  local text = cjson.encode(numbers)
  redis.call('ZREMRANGEBYSCORE', key, step, step)
  redis.call('ZADD', key, step, table.concat({ exact(position), exact(now_ms()), text }, ' '))
  thin(key, position)
end

local function report_trainer(keys, args)
  local incarnation, epoch, nonce, report, curves, step = unpack(args)
  check_given(report)
  check_choice(curves, 'curves', 'evaluations')
  check_counts(step)
  check_rows(args, 7, 2)
  if #report > MOST_REPORT_BYTES then refuse_argument(report, 'a report of 1 MiB or less') end
  for i = 7, #args, 2 do
    check_numbers(args[i + 1])
  end
  local prefix, err = read_run_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  if #args >= 7 then add_numbers(prefix .. curves, step, args, 7) end
  if report ~= '' then redis.call('HSET', prefix .. 'trainer', 'report', exact(now_ms()) .. ' ' .. report) end
  return 1
end
