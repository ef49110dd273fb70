-- One process takes a batch to run its pipeline (running -> finalizing); others wait for its result.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, handle, nonce, lease_ms
--   nonce: of this attempt   lease_ms: how long it may take
-- Returns: the state (`finalizing`: the caller has it; `busy`: another process has it), the result when there is one,
--   and per gathered group: id, the version it counts as, arrival, tries, tokens, reward, and the
--   name of its payload
-- Caller: Coordination.begin_finalize; coordinators
-- Repeat: with the same nonce returns the same, and `busy` once this attempt was undone; a caller that died is replaced
--   when its time is over
local function describe_gathered(clock, handle)
  local reply = { 'finalizing', '' }
  for _, id in ipairs(batch_ids(clock, handle)) do
    local status, arrival, tries, tokens, reward, payload =
      group_fields(clock, id, 'status', 'arrival', 'tries', 'tokens', 'reward', 'payload')
    if status == 'gathered' then
      -- stylua: ignore
      reply[#reply + 1] = {
        tonumber(id), oldest_token(clock, id, clock.floors), tonumber(arrival), tonumber(tries),
        tonumber(tokens), reward, payload or '',
      }
    end
  end
  return reply
end

local function begin_finalize(keys, args)
  local incarnation, handle, nonce, lease_ms = unpack(args)
  check_given(handle, nonce)
  check_counts(lease_ms)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local batch, now = batch_key(clock, handle), now_ms()
  local state, owner, owned_until_ms, result, undone =
    fields(batch, 'state', 'owner', 'owned_until_ms', 'result', 'undone')
  if state ~= 'running' and state ~= 'finalizing' then return { state or 'gone', result or '' } end
  local is_owned = state == 'finalizing' and owner ~= nonce and is_ahead(owned_until_ms, lease_ms, now)
  if is_owned or undone == nonce then return { 'busy', '' } end
  redis.call('HSET', batch, 'state', 'finalizing', 'owner', nonce, 'owned_until_ms', now + tonumber(lease_ms))
  return describe_gathered(clock, handle)
end
