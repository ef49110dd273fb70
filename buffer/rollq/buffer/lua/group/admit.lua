-- New prompts become groups, as many as the target leaves room for. The dataset's cursor moves with them.
-- Moves: new -> pending
-- KEYS: clock
-- ARGV: incarnation, epoch, cursor, target, step, then per prompt: cursor_after, row, prompt
--   row: '' when unknown
-- Returns: how many were admitted, the first group id, the cursor now
-- Caller: Admission.admit; producers
-- Repeat: finds that the cursor has moved, and admits nothing
--
-- A call admits nothing if one of its rows was excluded since the caller checked.
local FIRST_PROMPT = 6

-- Whether more groups wait for the archive than batches and audit sets may hold.
local function is_archive_full(clock)
  if clock.archive ~= 1 then return false end
  local most = clock.max_uncheckpointed * math.max(1, clock.batch_groups) + 2 * clock.audit
  return redis.call('ZCARD', clock.prefix .. 'leaving') > most
end

local function has_excluded(clock, args)
  local excluded = clock.prefix .. 'excluded'
  local digest = redis.call('HLEN', excluded) > 0 and redis.call('HGET', clock.prefix .. 'prompt_file', 'digest')
  if not digest then return false end
  for at = FIRST_PROMPT, #args, 3 do
    local row = args[at + 1]
    if row ~= '' and redis.call('HGET', excluded, row) == digest then return true end
  end
  return false
end

local function admit(keys, args)
  local incarnation, epoch, cursor, target, step = unpack(args, 1, FIRST_PROMPT - 1)
  check_whole(epoch, cursor, target, step)
  check_rows(args, FIRST_PROMPT, 3)
  for at = FIRST_PROMPT, #args, 3 do
    check_whole(args[at])
  end
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local progress = clock.prefix .. 'progress'
  local live_cursor = tonumber(redis.call('HGET', progress, 'cursor') or '0')
  local is_live = clock.epoch == tonumber(epoch) and clock.control == 'run' and not clock.sleep
  local may_admit = is_live and not is_archive_full(clock)
  if not may_admit or live_cursor ~= tonumber(cursor) then return { 0, 0, live_cursor } end
  local count = math.min((#args - FIRST_PROMPT + 1) / 3, tonumber(target) - scheduled(clock))
  if count <= 0 or has_excluded(clock, args) then return { 0, 0, live_cursor } end
  local now = now_ms()
  local first_id = redis.call('HINCRBY', progress, 'admitted', count) - count + 1
  for id = first_id, first_id + count - 1 do
    local at = FIRST_PROMPT + 3 * (id - first_id)
    local cursor_after, row, prompt = unpack(args, at, at + 2)
    create_group(clock, id, tonumber(step), 0, now, false, prompt)
    if row ~= '' then redis.call('HSET', group_key(clock.prefix, id), 'row', row) end
    live_cursor = tonumber(cursor_after)
  end
  redis.call('HSET', progress, 'cursor', live_cursor)
  wake(clock, EVENT.admit)
  return { count, first_id, live_cursor }
end
