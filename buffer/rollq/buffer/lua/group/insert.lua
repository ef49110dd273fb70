-- Inserts finished samples, which no worker of the run has made, as groups of a task that is offline.
-- Moves: new -> completed
-- KEYS: clock
-- ARGV: incarnation, source, after, then per group: prompt, reward, tokens, bytes, rows, samples, frame
--   source: their origin   after: how many groups of it were inserted before these
--   reward: mean of its samples   tokens: of their responses   bytes: of the frame
--   rows: of its samples, for the trainer (see `rollq.buffer.wire.sample_rows`)   samples: their outcomes (see
--   `rollq.buffer.wire.sample_outcomes`)   frame: of the WHOLE group
-- Returns: how many groups of the source were inserted so far
-- Caller: Insertion.insert; operators
-- Repeat: finds that more of the source was inserted, and inserts nothing
local FIRST_GROUP = 4
local GROUP_ARGS = 7

local function insert_group(clock, id, source, now, args, at)
  local prompt, reward, tokens, bytes, rows, samples, frame = unpack(args, at, at + GROUP_ARGS - 1)
  local key, letters = group_key(clock.prefix, id), string.rep(SAMPLE.completed, clock.group_size)
  -- stylua: ignore
  redis.call('HSET', key, 'arrival', id, 'attempt', 0, 'tries', 0, 'deaths', 0, 'step', clock.step, 'eval', 0,
    'letters', letters, 'versions', no_versions(clock), 'oldest', NO_TOKENS, 'newest', NO_VERSION, 'reward', reward,
    'tokens', tokens, 'admitted_ms', now, 'put_ms', now, 'counted_in', clock.epoch, 'rows', rows, 'samples', samples,
    'prompt', prompt, 'source', source)
  redis.call('HSET', rollout_key(clock.prefix, id), WHOLE, frame)
  note_bytes(clock, id, tonumber(bytes))
  file_result(clock, id, 'completed', NO_TOKENS, id)
end

local function insert(keys, args)
  local incarnation, source, after = unpack(args, 1, FIRST_GROUP - 1)
  check_counts(after)
  check_rows(args, FIRST_GROUP, GROUP_ARGS)
  for at = FIRST_GROUP, #args, GROUP_ARGS do
    check_numbers(args[at + 1])
    check_counts(args[at + 2], args[at + 3])
  end
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  if clock.offline ~= 1 then return fail('NOT_OFFLINE', '%s takes no insertions: offline is not set', clock.key) end
  local sources, progress = clock.prefix .. 'sources', clock.prefix .. 'progress'
  local inserted = tonumber(redis.call('HGET', sources, source) or '0')
  local count = (#args - FIRST_GROUP + 1) / GROUP_ARGS
  if inserted ~= tonumber(after) or count == 0 then return inserted end
  local now, first_id = now_ms(), redis.call('HINCRBY', progress, 'admitted', count) - count + 1
  redis.call('HINCRBY', progress, 'inserted', count)
  for id = first_id, first_id + count - 1 do
    insert_group(clock, id, source, now, args, FIRST_GROUP + GROUP_ARGS * (id - first_id))
  end
  redis.call('HSET', sources, source, inserted + count)
  wake(clock, EVENT.completed)
  return inserted + count
end
