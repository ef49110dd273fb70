-- The groups that a claim of a step would return now, for a trainer to read while it trains.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, step, want, seed
--   want: how many groups at most   seed: of draws
-- Returns: the groups (see `describe_groups`)
-- Caller: Claiming.preview; the trainer, any rank
-- Repeat: only reads
local function preview(keys, args)
  local incarnation, step, want, seed = unpack(args)
  check_whole(step, seed)
  check_counts(want)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local manifest = manifest_key(clock, step)
  local held, target = manifest_ids(manifest), open_target(manifest)
  local reply = describe_manifest(clock, manifest, 0, {})
  if has_batch(manifest) and not target then return reply end
  local lowest = stale_bound(stale_version(clock, tonumber(step)))
  local old = redis.call('ZCOUNT', clock.prefix .. 'by_version', '-inf', '(' .. lowest)
  local missing = math.max(0, math.min(tonumber(want), target or IDS_PER_CALL) - #held)
  local next_ones, probabilities = choose_fresh(clock, step, lowest, missing, math.min(old, IDS_PER_CALL), seed)
  return describe_groups(clock, next_ones, reply, clock.floors, probabilities)
end
