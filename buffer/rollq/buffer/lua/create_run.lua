-- Creates the run, or compares with the one that exists. The only function that creates.
-- KEYS[1] run hash   ARGV incarnation, schema, model fingerprint, tokenizer fingerprint (empty: not told)
-- Returns the incarnation that counts.   Caller: every role at start.   A repeat compares and changes nothing.
local function create_run(keys, args)
  local found = redis.call('HMGET', keys[1], 'incarnation', 'schema', 'model', 'tokenizer')
  if not found[1] and redis.call('HEXISTS', keys[1], 'restoring') == 1 then
    return fail('RUN_MISMATCH', 'the run is being restored from a snapshot: wait until that has ended; when it has died, '
      .. 'repeat `rollq restore`')
  end
  if not found[1] then
    redis.call('HSET', keys[1], 'incarnation', args[1], 'schema', args[2], 'model', args[3], 'tokenizer', args[4],
      'created_ms', now_ms())
    return args[1]
  end
  local names = { 'schema', 'model fingerprint', 'tokenizer fingerprint' }
  for i = 2, 4 do
    if found[i] ~= '' and args[i] ~= '' and found[i] ~= args[i] then
      return fail('RUN_MISMATCH', 'the run was created with ' .. names[i - 1] .. ' ' .. found[i] .. ', this role has ' .. args[i])
    end
  end
  for i, field in ipairs({ 'model', 'tokenizer' }) do
    if found[i + 2] == '' and args[i + 2] ~= '' then redis.call('HSET', keys[1], field, args[i + 2]) end
  end
  return found[1]
end
