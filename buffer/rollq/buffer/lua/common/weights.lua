-- The live weights of a run.

local function set_live_weights(prefix, epoch, version, uri, digest)
  -- stylua: ignore
  redis.call('HSET', prefix .. 'model', 'epoch', epoch, 'version', version, 'uri', uri, 'digest', digest,
    'published_ms', now_ms())
  redis.call('SET', prefix .. 'model_version', version)
end
