-- Writes something, so that WAIT waits for all that this server has written before. It is called on clusters only.
-- Moves: nothing
-- KEYS: clock or run
-- ARGV: none
-- Returns: 1
-- Caller: _Connections.flush; every role, and a restore
-- Repeat: writes the same
local function mark(keys, _)
  redis.call('SET', string.match(keys[1], '^.*:') .. 'mark', '')
  return 1
end
