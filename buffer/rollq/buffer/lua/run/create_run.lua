-- Creates the run, or compares it with the one that exists. No other function creates a run.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, schema, model, tokenizer, payloads, then (name, identity)...
--   model, tokenizer: fingerprints, '' when unknown   payloads: 'store' when some may be outside the run's servers,
--   'server' when some may be in the folder of an embedded server, else ''
--   name, identity: something that roles must agree on, such as the environment of a task, and a string that identifies
--   it
-- Returns: the incarnation of the run
-- Caller: BufferCore.create_run; every role, when it starts, and operators
-- Repeat: compares and changes nothing
local function refuse_mismatch(name, found, asked)
  if found == '' or asked == '' or found == asked then return nil end
  return fail(
    'RUN_MISMATCH',
    'the run was created with %s %s, this role has %s: use the same, or give the run another name',
    name,
    found,
    asked
  )
end

local FIRST_IDENTITY = 6

local function refuse_identities(run, args)
  for i = FIRST_IDENTITY, #args, 2 do
    local err = refuse_mismatch(args[i], redis.call('HGET', run, 'identity:' .. args[i]) or '', args[i + 1])
    if err then return err end
  end
  return nil
end

local function write_identities(run, args)
  for i = FIRST_IDENTITY, #args, 2 do
    if args[i + 1] ~= '' then redis.call('HSET', run, 'identity:' .. args[i], args[i + 1]) end
  end
end

local function create_run(keys, args)
  local incarnation, schema, model, tokenizer, payloads = unpack(args)
  check_given(incarnation, schema, model, tokenizer)
  check_choice(payloads, '', 'store', 'server')
  check_rows(args, FIRST_IDENTITY, 2)
  local run = keys[1]
  local existing, run_schema, run_model, run_tokenizer = fields(run, 'incarnation', 'schema', 'model', 'tokenizer')
  if not existing and redis.call('HEXISTS', run, 'restoring') == 1 then
    return fail(
      'RUN_MISMATCH',
      'the run is being restored from a snapshot: wait until that has finished; if it has died, '
        .. 'repeat `rollq snapshot load`'
    )
  end
  if not existing and redis.call('HEXISTS', run, 'deleting') == 1 then
    return fail(
      'RUN_MISMATCH',
      'the run is being deleted: wait until it is gone; if that has died, repeat `rollq runs delete`'
    )
  end
  if not existing then
    -- stylua: ignore
    redis.call('HSET', run, 'incarnation', incarnation, 'schema', schema, 'model', model,
      'tokenizer', tokenizer, 'payloads', payloads, 'created_ms', now_ms())
    write_identities(run, args)
    return incarnation
  end
  local err = refuse_mismatch('schema', run_schema, schema)
    or refuse_mismatch('model fingerprint', run_model, model)
    or refuse_mismatch('tokenizer fingerprint', run_tokenizer, tokenizer)
    or refuse_identities(run, args)
  if err then return err end
  write_identities(run, args)
  if run_model == '' and model ~= '' then redis.call('HSET', run, 'model', model) end
  if run_tokenizer == '' and tokenizer ~= '' then redis.call('HSET', run, 'tokenizer', tokenizer) end
  return existing
end
