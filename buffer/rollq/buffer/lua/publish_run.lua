-- Announces new weights to the workers.
-- KEYS[1] run hash   ARGV incarnation, epoch, nonce, version, uri, digest
-- Returns 1 published, 0 it was already.   Caller: trainer, rank 0.   A repeat changes nothing.
local function publish_run(keys, args)
  local prefix, err = read_run_as_trainer(keys[1], args[1], args[2], args[3])
  if err then return err end
  local model = redis.call('HMGET', prefix .. 'model', 'version', 'digest')
  local live, version = tonumber(model[1] or '-1'), tonumber(args[4])
  if version < live then
    return fail('VERSION_FALLS', 'version ' .. version .. ' was to be published, but ' .. live .. ' is live in this epoch')
  end
  if version == live then
    if model[2] == args[6] then return 0 end
    return fail('VERSION_FALLS', 'version ' .. version .. ' is already live with other weights (' .. tostring(model[2]) .. ')')
  end
  redis.call('HSET', prefix .. 'model', 'epoch', args[2], 'version', version, 'uri', args[5], 'digest', args[6], 'published_ms', now_ms())
  redis.call('HSET', prefix .. 'versions', args[2] .. ':' .. args[4], args[6])
  redis.call('SET', prefix .. 'model_version', args[4])
  redis.call('PUBLISH', prefix .. 'events', 'publish')
  return 1
end
