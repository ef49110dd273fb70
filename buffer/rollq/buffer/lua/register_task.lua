-- Creates a task's clock with its rules, or compares with the one that exists.
-- KEYS[1] clock   ARGV incarnation, events channel, epoch, nonce, version, from_step, then name, value of each rule
-- Returns 1 created, 0 existed.   Caller: every role at start.   A repeat compares and changes nothing.
local function register_task(keys, args)
  local found = redis.call('HGET', keys[1], 'incarnation')
  if found and found ~= args[1] then
    return fail('STORE_LOST', 'the store holds another incarnation of this run')
  end
  if found then
    for i = 7, #args, 2 do
      local value = redis.call('HGET', keys[1], args[i])
      if value ~= args[i + 1] then
        local task = string.match(keys[1], ':([^:]*)}:clock$')
        return fail('RUN_MISMATCH', "task '" .. task .. "' was registered with " .. args[i] .. ' = ' .. tostring(value) ..
          ', this role has ' .. args[i + 1] .. ': the settings of a run stay; change it back, or give the run another name')
      end
    end
    return 0
  end
  -- a task that joins late owes no batch for the steps before
  local from_step = tonumber(args[6])
  local committed = math.max(from_step, tonumber(args[5]))
  redis.call('HSET', keys[1], 'incarnation', args[1], 'events', args[2], 'epoch', args[3], 'nonce', args[4],
    'version', args[5], 'step', committed + 1, 'committed', committed, 'claimed_step', committed,
    'checkpoint', from_step, 'history', from_step, 'control', 'run', 'reaped_ms', 0, 'hold_until_ms', 0, 'saving_until_ms', 0, 'pin', '', 'open_evaluations', 0,
    unpack(args, 7))
  redis.call('HSET', string.sub(keys[1], 1, -6) .. 'progress', 'cursor', 0, 'admitted', 0, 'consumed', 0)
  return 1
end
