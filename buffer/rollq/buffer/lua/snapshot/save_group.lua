-- One group with its payload, at one instant.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, id
-- Returns: the group's hash, flat, with versions as they count now, empty when it has left; index, frame, ... of its
--   samples; and its payload, or ''
-- Caller: ReadingStored.stored_groups; a save, monitors, archivers
-- Repeat: only reads
local function save_group(keys, args)
  local incarnation, id = unpack(args)
  check_given(id)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local payload = group_fields(clock, id, 'payload')
  return {
    fields_as_counted(clock, id),
    redis.call('HGETALL', rollout_key(clock.prefix, id)),
    payload and not is_away(payload) and redis.call('GET', payload_key(clock.prefix, id, payload)) or '',
  }
end
