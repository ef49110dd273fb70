-- How many deaths of workers make a group suspicious enough to run alone.

local lone_after
do
  local LEAST_FINISHED = 100 -- groups; fewer say nothing
  local LEAST_KILLERS = 0.001 -- of all groups
  local MOST_MORE = 2 -- deaths than the task's rules say

  -- `least` deaths, or as many more as it takes until bad luck explains them less often than a group that kills.
  -- `outlived`: deaths of workers whose groups were finished later.
  local function deaths_until_alone(least, finished, outlived, quarantined)
    local luck = finished >= LEAST_FINISHED and outlived / finished or 0
    if luck <= 0 then return least end
    if luck >= 1 then return least + MOST_MORE end
    local killers = math.min(math.max(LEAST_KILLERS, quarantined / finished), 1)
    return math.max(least, math.min(math.ceil(math.log(killers) / math.log(luck)), least + MOST_MORE))
  end

  -- After how many deaths a group runs alone on its next try.
  function lone_after(clock)
    local finished, outlived, quarantined = fields(clock.prefix .. 'progress', 'produced', 'outlived', 'quarantined')
    local least = clock.max_deaths - 1
    return deaths_until_alone(least, tonumber(finished or 0), tonumber(outlived or 0), tonumber(quarantined or 0))
  end
end
