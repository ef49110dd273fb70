-- Reserves a run that does not exist for one snapshot. No role can start until finish_restore has ended the restore.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, digest, payloads
--   incarnation: of the new run   digest: of the snapshot   payloads: as in create_run
-- Returns: the incarnation of the run
-- Caller: Restoring.restore; a restore
-- Repeat: returns the same incarnation, even to another process after the first one died
local PLACES = {
  [''] = 'without payloads.url',
  store = 'with payloads.url',
  server = 'beside the folder of its embedded server',
}

local function restore_run(keys, args)
  local incarnation, digest, payloads = unpack(args)
  check_choice(payloads, '', 'store', 'server')
  local run = keys[1]
  local existing, restoring, restored_as, place = fields(run, 'incarnation', 'restoring', 'restored_as', 'payloads')
  if existing then
    return fail(
      'RUN_MISMATCH',
      'the run exists here already: a snapshot is restored into a run that does not, so give it '
        .. 'another name (--run), or use an empty server'
    )
  end
  if redis.call('HEXISTS', run, 'deleting') == 1 then
    return fail('RUN_MISMATCH', 'a run of this name is being deleted here: repeat `rollq runs delete`, then restore')
  end
  if restoring and restoring ~= digest then
    return fail(
      'RUN_MISMATCH',
      'another snapshot was being restored here and did not end: repeat that one, or give the run '
        .. 'another name (--run)'
    )
  end
  if restoring and place ~= payloads then
    return fail(
      'RUN_MISMATCH',
      'the unfinished restore here was %s: repeat it that way, or give the run another name (--run)',
      PLACES[place]
    )
  end
  if restoring then return restored_as end
  redis.call('HSET', run, 'restoring', digest, 'restored_as', incarnation, 'payloads', payloads)
  return incarnation
end
