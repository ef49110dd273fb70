-- Announces new weights to the workers.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, epoch, nonce, version, uri, digest
-- Returns: 1 when they were published, 0 when they were live already
-- Caller: Training.publish; the trainer, rank 0
-- Repeat: changes nothing
local function run_publish(keys, args)
  local incarnation, epoch, nonce, version, uri, digest = unpack(args)
  check_whole(version)
  check_given(uri, digest)
  local prefix, err = read_run_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  local live_version, live_digest = fields(prefix .. 'model', 'version', 'digest')
  local ahead = tonumber(version) - tonumber(live_version or '-1')
  if ahead < 0 then
    return fail('VERSION_FALLS', 'version %s cannot be published: %s is live in this epoch', version, live_version)
  end
  if ahead == 0 and live_digest == digest then return 0 end
  if ahead == 0 then
    return fail('VERSION_FALLS', 'version %s is already live with other weights (%s)', version, live_digest)
  end
  set_live_weights(prefix, epoch, version, uri, digest)
  redis.call('HSET', prefix .. 'versions', version, digest)
  redis.call('PUBLISH', prefix .. 'events:' .. EVENT.publish, '')
  return 1
end
