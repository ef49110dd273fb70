-- Parts of samples that are still being made: fields of a group's rollout, after the fields of whole samples.
--
-- Versions count as they did when the worker learned of the epoch. Until `put` counts them again, they decide only what
-- the next lease leaves out as too old, and which batches wait for the group.
local FIRST_PART = 2
local PART_ARGS = 10

local keep_parts
do
  local function check_part(clock, args, at)
    local id, attempt, nonce, number, index, letter, version, token_version, begins, part =
      unpack(args, at, at + PART_ARGS - 1)
    check_given(id, attempt, nonce, part)
    check_counts(number, index)
    if tonumber(index) >= clock.group_size then refuse_argument(index, 'the index of a sample') end
    check_choice(letter, SAMPLE.completed, SAMPLE.aborted, SAMPLE.failed)
    if version ~= NO_VERSION then check_whole(version, token_version) end
    check_choice(begins, '0', '1')
  end

  -- The comma-separated `versions` with `version` for sample `index`, unless the part continues an older sample.
  local function note_version(versions, index, version, begins)
    local kept = split(versions)
    local known = kept[index + 1]
    local older = not begins and known ~= NO_VERSION and (version == NO_VERSION or tonumber(known) < tonumber(version))
    if not older then kept[index + 1] = version end
    return table.concat(kept, ',')
  end

  -- The versions of a group's samples, and the versions of their oldest tokens, as they count in the live epoch. So all
  -- samples and parts of a group are counted in one epoch.
  local function count_anew(clock, key, versions, token_versions)
    local cap = cap_of(clock, redis.call('HGET', key, 'counted_in'))
    redis.call('HSET', key, 'counted_in', clock.epoch)
    local none = no_versions(clock)
    return cap_versions(versions or none, cap), cap_versions(token_versions or none, cap - clock.token_shift)
  end

  -- Adds a part to its sample; returns the word for it.
  local function keep_part(clock, key, args, at)
    local id, attempt, nonce, number, index, letter, version, token_version, begins, part =
      unpack(args, at, at + PART_ARGS - 1)
    -- stylua: ignore
    local live_attempt, live_nonce, parts, bytes, letters, versions, token_versions, lent, loan_parts = fields(
      key, 'attempt', 'nonce', 'parts', 'part_bytes', 'letters', 'versions', 'token_versions', 'loans', 'loan_parts')
    local lent_now = nonce ~= live_nonce and loans.read(lent) or {}
    local loan = loans.find(lent_now, nonce)
    local is_mine = live_attempt == attempt and (nonce == live_nonce or (loan and loans.has_index(loan.indices, index)))
    number, parts, loan_parts = tonumber(number), tonumber(parts or '0'), tonumber(loan_parts or '0')
    local before = loan and loan.parts or parts - loan_parts
    if not is_mine or number > before then return 'refused' end
    if number < before then return 'kept' end
    bytes = tonumber(bytes or '0') + #part
    if parts >= MOST_PARTS or bytes > MOST_PART_BYTES then return 'full' end
    if loan then
      loan.parts = loan.parts + 1
      loans.write(key, lent_now)
      redis.call('HSET', key, 'loan_parts', loan_parts + 1)
    end
    index = tonumber(index)
    letters = string.sub(letters, 1, index) .. letter .. string.sub(letters, index + 2)
    if parts == 0 then
      versions, token_versions = count_anew(clock, key, versions, token_versions)
    end
    versions = note_version(versions, index, version, begins == '1')
    if counts_masked(clock) then
      token_versions = note_version(token_versions or no_versions(clock), index, token_version, begins == '1')
      redis.call('HSET', key, 'token_versions', token_versions)
    end
    redis.call('HSET', rollout_key(clock.prefix, id), clock.group_size + parts, part)
    redis.call('HSET', key, 'letters', letters, 'versions', versions, 'parts', parts + 1, 'part_bytes', bytes)
    return 'kept'
  end

  -- Adds the parts of a call, once all of them are found to be sound; returns a word for each.
  function keep_parts(clock, args)
    for at = FIRST_PART, #args, PART_ARGS do
      check_part(clock, args, at)
    end
    local words = {}
    for at = FIRST_PART, #args, PART_ARGS do
      words[#words + 1] = keep_part(clock, group_key(clock.prefix, args[at]), args, at)
    end
    return words
  end
end
