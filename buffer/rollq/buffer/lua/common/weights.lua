-- The live weights of a run, and the epochs that have published the same weights.
--
-- `published` has for each version: the first epoch since which every epoch that published it had the same weights, and
-- their digest. So tokens that these epochs made with this version come from the same weights.

-- The first epoch since which all publications of a version had these weights, if `epoch` publishes it. Only a digest
-- that is a sha256 in hex identifies weights.
local function published_since(prefix, epoch, version, digest)
  local since, known = string.match(redis.call('HGET', prefix .. 'published', version) or '', '^(%d+) (.*)$')
  local is_proof = #digest == 64 and not string.find(digest, '[^%x]')
  if not is_proof or known ~= digest then return tonumber(epoch) end
  local traced_since = redis.call('HGET', prefix .. 'trainer', 'traced_since') or epoch
  return math.max(tonumber(since), tonumber(traced_since))
end

-- Notes that an epoch publishes a version; returns what `published_since` does.
local function note_published(prefix, epoch, version, digest)
  local since = published_since(prefix, epoch, version, digest)
  redis.call('HSET', prefix .. 'published', version, exact(since) .. ' ' .. digest)
  return since
end

local function set_live_weights(prefix, epoch, version, uri, digest)
  -- stylua: ignore
  redis.call('HSET', prefix .. 'model', 'epoch', epoch, 'version', version, 'uri', uri, 'digest', digest,
    'published_ms', now_ms())
  redis.call('SET', prefix .. 'model_version', version)
end
