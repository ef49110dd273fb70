-- Changes rules of a task, for every claim from now on, and keeps a record of it.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, revision, record, file, digest, then per rule: name, value
--   revision: of the rules that the caller has read   record: JSON, what was changed and by whom
--   file: JSON, the rules of the settings file that asked for it, '' when none did   digest: of these
-- Returns: the revision now, or -1 when the rules have changed since the caller read them
-- Caller: Registry._replace; every role, when it starts, and operators
-- Repeat: returns -1, and so does a copy of the call that arrives after a later one
local FIRST_RULE = 6
local KEPT_REVISIONS = 100

local function change_rules(keys, args)
  local incarnation, revision, record, file, digest = unpack(args, 1, FIRST_RULE - 1)
  check_given(record, file, digest)
  check_counts(revision)
  check_rows(args, FIRST_RULE, 2)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  revision = tonumber(revision)
  if (clock.rules_revision or 1) ~= revision then return -1 end
  local changes = { rules_revision = revision + 1 }
  for at = FIRST_RULE, #args, 2 do
    local name, value = unpack(args, at, at + 1)
    if not MAY_CHANGE[name] then refuse_argument(name, 'a rule that may change') end
    changes[name] = value
  end
  write_clock(clock, changes)
  record_rules(clock.prefix, clock.rules_revision, clock.claimed_step + 1, record, file, digest)
  redis.call('HDEL', clock.prefix .. 'rules', clock.rules_revision - KEPT_REVISIONS)
  wake(clock, EVENT.control)
  return clock.rules_revision
end
