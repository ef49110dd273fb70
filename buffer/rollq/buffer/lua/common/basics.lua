-- Errors, time, numbers, and commands on many values at once.

-- The error reply for a code (see `ERRORS` in Python). `message` is a template for string.format.
local function fail(code, message, ...)
  return redis.error_reply('ROLLQ_' .. code .. ' ' .. string.format(message, ...))
end

local function now_ms()
  local seconds, microseconds = unpack(redis.call('TIME'))
  return tonumber(seconds) * 1000 + math.floor(tonumber(microseconds) / 1000)
end

-- Whether a deadline that was set at most `longest_ms` ahead is still to come. A deadline further ahead was set before
-- the server's clock was set back, and counts as over.
local function is_ahead(deadline_ms, longest_ms, now)
  local left_ms = (tonumber(deadline_ms) or 0) - now
  return left_ms > 0 and left_ms <= tonumber(longest_ms)
end

local function exact(number)
  return string.format('%.0f', number)
end

-- The named fields of a hash, as separate values; false for each field that is missing.
local function fields(key, ...)
  return unpack(redis.call('HMGET', key, ...))
end

-- The parts of a comma-separated list.
local function split(list)
  local parts = {}
  for part in string.gmatch(list, '[^,]+') do
    parts[#parts + 1] = part
  end
  return parts
end

-- One command with a list of arguments: members, or alternating scores and members. Does nothing for an empty list.
local function call_many(command, key, arguments)
  if #arguments > 0 then redis.call(command, key, unpack(arguments)) end
end

local function append_pair(list, first, second)
  list[#list + 1] = first
  list[#list + 1] = second
end

-- Adds numbers to fields of a hash with two commands, however many fields there are. Whole numbers stay whole.
local function add_to_fields(key, additions)
  local names, sums = {}, {}
  for name in pairs(additions) do
    names[#names + 1] = name
  end
  for i, value in ipairs(redis.call('HMGET', key, unpack(names))) do
    append_pair(sums, names[i], string.format('%.17g', (tonumber(value) or 0) + additions[names[i]]))
  end
  redis.call('HSET', key, unpack(sums))
end
