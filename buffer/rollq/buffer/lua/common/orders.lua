-- The orders in which batches take completed groups.
--
-- order        completed groups are scored by    a batch takes
-- staleness    version, then arrival             the stalest first
-- newest       version, then arrival             the newest version first
-- uniform      version, then arrival             any, with equal probabilities
-- arrival      arrival                           the first to come
-- priority     level, then arrival               any, with probabilities in proportion to their priorities
--
-- The level of a priority is its logarithm, eight levels to each doubling: priorities of one level count as equal. So
-- groups of one level are neighbours, and a draw takes O(log n).

local sorts_by_version, is_drawn, result_score, choose_fresh
do
  local LEVELS_PER_DOUBLING, MOST_DOUBLINGS = 8, 32

  -- Whether completed groups have the scores of the version index.
  function sorts_by_version(clock)
    return clock.order ~= 'arrival' and clock.order ~= 'priority'
  end

  function is_drawn(clock)
    return clock.order == 'uniform' or clock.order == 'priority'
  end

  -- The level of a group's priority, which falls with each use.
  local function level_of_priority(priority, decay, uses)
    local doublings = math.log(tonumber(priority or '1') * decay ^ tonumber(uses or '0')) / math.log(2)
    doublings = math.max(-MOST_DOUBLINGS, math.min(MOST_DOUBLINGS, doublings))
    return math.floor(doublings * LEVELS_PER_DOUBLING + 0.5)
  end

  function result_score(clock, id, status, oldest, arrival)
    if clock.order == 'arrival' then return arrival end
    if clock.order ~= 'priority' or status ~= 'completed' then return version_score(oldest, arrival) end
    local priority, uses = group_fields(clock, id, 'priority', 'uses')
    return level_of_priority(priority, clock.priority_decay, uses) * ARRIVALS + arrival
  end

  local DIGITS = 12

  -- Two numbers in [0, 1) that follow from a text alone.
  local function fractions(text)
    local digest = redis.sha1hex(text)
    local function part(first)
      return tonumber(string.sub(digest, first, first + DIGITS - 1), 16) / 16 ^ DIGITS
    end
    return part(1), part(DIGITS + 1)
  end

  local function weight_of(score)
    return 2 ^ (math.floor(tonumber(score) / ARRIVALS) / LEVELS_PER_DOUBLING)
  end

  -- Neighbours in completed that are equally likely: their first rank, how many there are, how many of them are left,
  -- and the weight of each. `moved`: a place that was drawn -> the place of the group that has moved there.
  local function new_stratum(rank, count, weight)
    return { rank = rank, count = count, left = count, weight = weight, moved = {} }
  end

  local function strata_of(clock, lowest)
    local completed = clock.prefix .. 'completed'
    local strata, rank, all = {}, 0, redis.call('ZCARD', completed)
    if clock.order == 'uniform' then
      local fresh = redis.call('ZCOUNT', completed, lowest, '+inf')
      return { new_stratum(all - fresh, fresh, 1) }
    end
    while rank < all do
      local _, score = unpack(redis.call('ZRANGE', completed, rank, rank, 'WITHSCORES'))
      local level = math.floor(tonumber(score) / ARRIVALS)
      local first, next_one = exact(level * ARRIVALS), '(' .. exact((level + 1) * ARRIVALS)
      strata[#strata + 1] = new_stratum(rank, redis.call('ZCOUNT', completed, first, next_one), weight_of(score))
      rank = rank + strata[#strata].count
    end
    return strata
  end

  local function total_weight(strata)
    local total = 0
    for _, stratum in ipairs(strata) do
      total = total + stratum.left * stratum.weight
    end
    return total
  end

  -- Takes one group out of its stratum; returns its rank and its weight.
  local function draw(strata, text)
    local of_stratum, of_place = fractions(text)
    local rest, chosen = of_stratum * total_weight(strata), nil
    for _, stratum in ipairs(strata) do
      if stratum.left > 0 then
        chosen, rest = stratum, rest - stratum.left * stratum.weight
        if rest < 0 then break end
      end
    end
    local place = math.floor(of_place * chosen.left)
    local rank = chosen.rank + (chosen.moved[place] or place)
    chosen.left = chosen.left - 1
    chosen.moved[place] = chosen.moved[chosen.left] or chosen.left
    return rank, chosen.weight
  end

  -- The weight of stale groups that are among the completed groups while the buffer is being saved.
  local function stale_weight(clock, lowest)
    local total = 0
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', clock.prefix .. 'by_version', '-inf', '(' .. lowest)) do
      local score = redis.call('ZSCORE', clock.prefix .. 'completed', id)
      if score then total = total + weight_of(score) end
    end
    return total
  end

  -- Draws fresh groups without replacement. The draw follows from the seed, the task, the step and the completed
  -- groups. Returns their ids, and the probability with which each would be drawn first. See `choose_fresh`.
  local function draw_fresh(clock, step, lowest, want, old, seed)
    local strata, ids, probabilities, number = strata_of(clock, lowest), {}, {}, 0
    local total = total_weight(strata)
    local has_stale = old > 0 and clock.order == 'priority'
    if has_stale then total = total - stale_weight(clock, lowest) end
    local text = seed .. ':' .. string.match(clock.prefix, '^rollq:{[^:]*:(.*)}:$') .. ':' .. exact(step) .. ':'
    while #ids < want and total_weight(strata) > 0 do
      number = number + 1
      local rank, weight = draw(strata, text .. number)
      local id = unpack(redis.call('ZRANGE', clock.prefix .. 'completed', rank, rank))
      if not has_stale or tonumber(redis.call('ZSCORE', clock.prefix .. 'by_version', id)) >= tonumber(lowest) then
        ids[#ids + 1], probabilities[#probabilities + 1] = id, string.format('%.9g', weight / total)
      end
    end
    return ids, probabilities
  end

  -- The next `want` fresh groups of a batch, which score `lowest` or more in the version index; and for draws, how
  -- probable each was. While the buffer is being saved, nothing expires: in an order that is not by version, up to
  -- `old` stale groups may then be among the completed groups, and are skipped.
  function choose_fresh(clock, step, lowest, want, old, seed)
    local completed, ids = clock.prefix .. 'completed', {}
    if want == 0 then return ids, {} end
    if is_drawn(clock) then return draw_fresh(clock, step, lowest, want, old, seed) end
    if clock.order == 'newest' then
      return redis.call('ZREVRANGEBYSCORE', completed, '+inf', lowest, 'LIMIT', 0, want), {}
    end
    if clock.order == 'staleness' then
      return redis.call('ZRANGEBYSCORE', completed, lowest, '+inf', 'LIMIT', 0, want), {}
    end
    for _, id in ipairs(redis.call('ZRANGE', completed, 0, want + old - 1)) do
      local score = tonumber(redis.call('ZSCORE', clock.prefix .. 'by_version', id))
      if #ids < want and score >= tonumber(lowest) then ids[#ids + 1] = id end
    end
    return ids, {}
  end
end

-- How many completed groups are fresh at `step`, and how many groups in generation would be too old one step later. The
-- batch waits for the latter: without them, it would hold the quick, short answers and lose the long answers.
local function count_ready(clock, step)
  local completed, stale = clock.prefix .. 'completed', stale_version(clock, step)
  local ready
  if sorts_by_version(clock) then
    ready = redis.call('ZCOUNT', completed, stale_bound(stale), '+inf')
  else
    -- the version index holds completed and aborted groups; stale groups that are not swept yet all count as not ready
    local old = redis.call('ZCOUNT', clock.prefix .. 'by_version', '-inf', '(' .. stale_bound(stale))
    ready = math.max(0, redis.call('ZCARD', completed) - old)
  end
  local stragglers = 0
  if clock.stragglers == 'wait' then
    stragglers = redis.call('ZCOUNT', clock.prefix .. 'generating', stale + 1, stale + 1)
  end
  return ready, stragglers
end
