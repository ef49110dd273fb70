-- Records which prompts a task has, or returns the record. Facts about other prompts are dropped.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, revision, digest, rows, seeds, path
--   revision: of the record that is to be replaced, 0 for the first   digest: of the file   seeds: of the order
-- Returns: what is recorded now: revision, digest, rows, seeds, path
-- Caller: Admission.record_prompts; producers, when they start
-- Repeat: finds a later revision, and changes nothing
local function record_prompts(keys, args)
  local incarnation, revision, digest, rows, seeds, path = unpack(args)
  check_counts(revision, rows)
  check_given(digest, seeds, path)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local key = clock.prefix .. 'prompt_file'
  local known, known_digest = fields(key, 'revision', 'digest')
  revision = tonumber(revision)
  if tonumber(known or '0') == revision then
    if known and known_digest ~= digest then
      local progress = clock.prefix .. 'progress'
      redis.call('UNLINK', clock.prefix .. 'prompts', clock.prefix .. 'too_long')
      redis.call('HDEL', progress, 'rows_too_long')
      redis.call('HSET', progress, 'prompts_from', redis.call('HGET', progress, 'admitted') + 1)
    end
    -- stylua: ignore
    redis.call('HSET', key, 'revision', revision + 1, 'digest', digest, 'rows', rows, 'seeds', seeds, 'path', path)
  end
  return redis.call('HMGET', key, 'revision', 'digest', 'rows', 'seeds', 'path')
end
