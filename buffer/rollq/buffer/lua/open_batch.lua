-- Begins a batch: groups that are gathered until all of them are finished, instead of completed one by one.
-- KEYS[1] clock   ARGV incarnation, batch id, handle for a new one, type train|eval, step, digest of its content
-- Returns the handle, 1 when it is new, else 0. An evaluation names one version: the live one.
-- Caller: coordinator, trainer.   A repeat with the same content returns the same handle.
local function open_batch(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local id, handle = args[2], args[3]
  local batches = clock.prefix .. 'batches'
  local standing = redis.call('HGET', batches, id)
  if standing then
    local found = redis.call('HMGET', clock.prefix .. 'batch:' .. standing, 'state', 'digest')
    if found[1] == 'running' or found[1] == 'finalizing' then
      if found[2] ~= args[6] then return fail('BATCH_EXISTS', "batch '" .. id .. "' is " .. found[1] .. ' with other content') end
      return { standing, 0 }
    end
  end
  if args[4] == 'eval' then
    if clock.kind ~= 'eval' then return fail('EVALUATION', 'the task is trained on, and cannot be evaluated') end
    local pin = exact(clock.epoch) .. ':' .. exact(clock.version)
    if clock.pin ~= pin then
      if clock.open_evaluations > 0 then return fail('BATCH_EXISTS', 'an evaluation of version ' .. clock.pin .. ' (epoch:version) is under way: finalize or abort it') end
      redis.call('HSET', keys[1], 'pin', pin)
    end
    redis.call('HINCRBY', keys[1], 'open_evaluations', 1)
  elseif clock.kind == 'eval' then
    return fail('EVALUATION', 'groups of an evaluation are never trained')
  end
  redis.call('HSET', batches, id, handle)
  redis.call('HSET', clock.prefix .. 'batch:' .. handle, 'id', id, 'state', 'running', 'type', args[4], 'step', args[5],
    'digest', args[6], 'epoch', clock.epoch, 'version', clock.version, 'size', 0, 'closed', 0, 'opened_ms', now_ms())
  redis.call('PUBLISH', clock.events, 'batch')
  return { handle, 1 }
end
