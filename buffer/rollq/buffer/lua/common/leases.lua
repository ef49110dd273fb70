-- Facts about a group for the worker that samples it.

-- The mean length of earlier answers to the prompt of a group, as text; '' if unknown.
local function expected_tokens(clock, id)
  local row = clock.prompt_stats == 1 and tonumber(id) >= first_of_prompts(clock) and group_fields(clock, id, 'row')
  local known = row and redis.call('HGET', clock.prefix .. 'prompts', row)
  return known and string.match(known, '[^,]+$') or ''
end

-- Describes a group to the worker that has leased it: see `lease`. `bare`: without the group's samples.
local function describe_lease_of(clock, id, bare)
  -- stylua: ignore
  local attempt, tries, step, evaluation, deaths, alone, letters, prompt, interruptions, parts, payload, admitted_ms,
    leased_ms, row = group_fields(clock, id, 'attempt', 'tries', 'step', 'eval', 'deaths', 'alone', 'letters', 'prompt',
    'interruptions', 'parts', 'payload', 'admitted_ms', 'leased_ms', 'row')
  local suspect = tonumber(deaths) > 0 and 1 or 0
  local must_finish = tonumber(interruptions or '0') >= clock.interruptions and 1 or 0
  if bare then
    parts, payload = nil, nil
  end
  local kept = not bare and has_samples(letters) and redis.call('HGETALL', rollout_key(clock.prefix, id)) or {}
  -- stylua: ignore
  return {
    tonumber(id), tonumber(attempt), tonumber(tries), tonumber(step), tonumber(evaluation), suspect, tonumber(alone),
    tonumber(admitted_ms or 0), tonumber(leased_ms or 0), letters, prompt, must_finish, kept, tonumber(parts or '0'),
    payload or '', expected_tokens(clock, id), row or '',
  }
end
