-- Refuses calls with arguments that no role of rollq sends, before anything is written.

local MOST_DIGITS = 15 -- doubles hold such numbers exactly
local MOST_SHOWN = 40

local function refuse_argument(value, wanted)
  local found = value and "'" .. string.sub(value, 1, MOST_SHOWN) .. "'" or 'missing'
  error(fail('BAD_ARGUMENT', 'an argument is %s, and must be %s', found, wanted))
end

local function is_given(text)
  return text ~= nil
end

local function is_whole(text)
  return text and #text <= MOST_DIGITS and string.find(text, '^-?%d+$')
end

local function is_count(text)
  return text and #text <= MOST_DIGITS and string.find(text, '^%d+$')
end

local function is_finite(text)
  local number = text and string.find(text, '^[%d.e+-]+$') and tonumber(text)
  return number and number == number and math.abs(number) < math.huge
end

local function check_each(is_right, wanted, ...)
  for i = 1, select('#', ...) do
    local text = select(i, ...)
    if not is_right(text) then refuse_argument(text, wanted) end
  end
end

local function check_given(...)
  check_each(is_given, 'a text', ...)
end

local function check_whole(...)
  check_each(is_whole, 'a whole number', ...)
end

local function check_counts(...)
  check_each(is_count, 'a whole number of at least 0', ...)
end

local function check_numbers(...)
  check_each(is_finite, 'a finite number', ...)
end

-- `text` must be one of the other arguments.
local function check_choice(text, ...)
  for i = 1, select('#', ...) do
    if text == select(i, ...) then return end
  end
  refuse_argument(text, 'one of ' .. table.concat({ ... }, ', '))
end

-- The arguments from index `first` on must make up rows of `width`.
local function check_rows(args, first, width)
  local count = #args - first + 1
  if count < 0 or count % width ~= 0 then refuse_argument(nil, 'one of ' .. width .. ' in a row') end
end
