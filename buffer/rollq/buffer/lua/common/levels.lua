-- Limits by epoch, as text: 'epoch:level,...' in ascending order. An entry holds for its epoch, and for earlier epochs
-- that no earlier entry covers. Each new epoch lowers the levels of all earlier epochs, and only the levels of the last
-- epochs rise again, so levels never fall from an entry to the next.

local EPOCH_LEVEL = '(%d+):(%d+)'

-- The level of an epoch; nil when it has none.
local function level_of(levels, epoch)
  for last, level in string.gmatch(levels, EPOCH_LEVEL) do
    if epoch <= tonumber(last) then return tonumber(level) end
  end
  return nil
end

-- The levels after `new_epoch` has lowered earlier ones to `level`. Levels up to `settled` share one entry.
local function lower_levels(levels, new_epoch, level, settled)
  local kept, lowest = {}, nil
  for last, known in string.gmatch(levels, EPOCH_LEVEL) do
    if tonumber(known) <= settled then
      lowest = last .. ':' .. known
    elseif tonumber(known) < level then
      kept[#kept + 1] = last .. ':' .. known
    end
  end
  kept[#kept + 1] = exact(new_epoch - 1) .. ':' .. exact(level)
  if lowest then table.insert(kept, 1, lowest) end
  return table.concat(kept, ',')
end
