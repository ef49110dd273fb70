-- Excludes rows of a task's prompts, so that no producer admits them, or includes them again; keeps a record of it.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, revision, record, digest, undo, then rows
--   revision, record: as in change_rules   digest: of the prompts that the rows belong to   undo: 1 to include them
-- Returns: the revision now, -1 when the rules have changed since the caller read them, or -2 when the task has other
--   prompts
-- Caller: Excluding.exclude_rows; operators
-- Repeat: returns -1, and so does a copy of the call that arrives after a later one
local FIRST_ROW = 6
local KEPT_REVISIONS = 100

local function exclude_rows(keys, args)
  local incarnation, revision, record, digest, undo = unpack(args, 1, FIRST_ROW - 1)
  check_given(record, digest)
  check_counts(revision)
  check_choice(undo, '0', '1')
  for at = FIRST_ROW, #args do
    check_counts(args[at])
  end
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  revision = tonumber(revision)
  if (clock.rules_revision or 1) ~= revision then return -1 end
  if redis.call('HGET', clock.prefix .. 'prompt_file', 'digest') ~= digest then return -2 end
  local excluded = clock.prefix .. 'excluded'
  for at = FIRST_ROW, #args do
    if undo == '1' then
      redis.call('HDEL', excluded, args[at])
    else
      redis.call('HSET', excluded, args[at], digest)
    end
  end
  redis.call('HINCRBY', clock.prefix .. 'progress', 'exclusions', 1)
  write_clock(clock, { rules_revision = revision + 1 })
  record_rules(clock.prefix, clock.rules_revision, clock.claimed_step + 1, record, '', '')
  redis.call('HDEL', clock.prefix .. 'rules', clock.rules_revision - KEPT_REVISIONS)
  wake(clock, EVENT.control)
  return clock.rules_revision
end
