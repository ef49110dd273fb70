-- Drops the plans of steps that a checkpoint covers, or that were released or rewound.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, epoch, nonce, first, last
-- Returns: 1
-- Caller: Claiming._forget_plans; the trainer, rank 0
-- Repeat: finds nothing
local function forget_plans(keys, args)
  local incarnation, epoch, nonce, first, last = unpack(args)
  local prefix, err = read_run_as_trainer(keys[1], incarnation, epoch, nonce)
  if err then return err end
  for step = tonumber(first), tonumber(last) do
    redis.call('UNLINK', prefix .. 'plan:' .. step)
  end
  return 1
end
