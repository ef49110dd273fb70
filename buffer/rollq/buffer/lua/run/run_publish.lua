-- Announces new weights to the workers.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, epoch, nonce, version, uri, digest
--   digest: the sha256 of their manifest, in hex; weights with another digest count as other weights
-- Returns: the first epoch since which every epoch that published this version had these weights
-- Caller: Training.publish; the trainer, rank 0
-- Repeat: changes nothing

-- Remembers whether replays publish the same weights again. After other weights, neither this replay nor the next waits
-- for the same weights.
local function note_replay(prefix, is_same, is_other)
  local awaited = redis.call('HGET', prefix .. 'model', 'awaited')
  if is_same then
    redis.call('HDEL', prefix .. 'trainer', 'replays')
  elseif is_other and awaited and awaited ~= '' then
    redis.call('HSET', prefix .. 'trainer', 'replays', 'differ')
    redis.call('HSET', prefix .. 'model', 'awaited', '')
  end
end

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
  if ahead == 0 and live_digest == digest then return published_since(prefix, epoch, version, digest) end
  if ahead == 0 then
    return fail('VERSION_FALLS', 'version %s is already live with other weights (%s)', version, live_digest)
  end
  local recorded = redis.call('HGET', prefix .. 'versions', version)
  local since = note_published(prefix, epoch, version, digest)
  note_replay(prefix, since < tonumber(epoch), recorded and recorded ~= digest)
  set_live_weights(prefix, epoch, version, uri, digest)
  redis.call('HSET', prefix .. 'versions', version, digest)
  redis.call('PUBLISH', prefix .. 'events:' .. EVENT.publish, '')
  return since
end
