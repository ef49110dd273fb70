-- Drops the plans of steps first .. last: covered by a checkpoint, released or rewound.
-- KEYS[1] run hash   ARGV incarnation, epoch, nonce, first, last
-- Returns 1.   Caller: trainer, rank 0.   A repeat finds nothing.
local function forget_plans(keys, args)
  local prefix, err = read_run_as_trainer(keys[1], args[1], args[2], args[3])
  if err then return err end
  for step = tonumber(args[4]), tonumber(args[5]) do redis.call('UNLINK', prefix .. 'plan:' .. step) end
  return 1
end
