-- Returns the values and times to live of a page of locks.
--
-- KEYS     the locks
-- ARGV[1]  the longest value of a lock, in bytes
-- ARGV[2]  the longest life of a lock, in ms
--
-- A value of another client without expiry is no lock. A lock of ours counts for the longest life
-- if somebody removed or prolonged its expiry by hand: its life was promised when it was extended.

local longest_value, longest_life = tonumber(ARGV[1]), tonumber(ARGV[2])
local out = {}
for i, key in ipairs(KEYS) do
  local left, value = redis.call('PTTL', key), false
  if left == -1 or left > 0 then
    -- A longer value belongs to another client. Its beginning is enough to keep the lock taken.
    local is_long = redis.call('STRLEN', key) > longest_value
    value = is_long and redis.call('GETRANGE', key, 0, longest_value - 1) or redis.call('GET', key)
    local mark = string.sub(value, 58, 58)
    local ours = not is_long and string.sub(value, 17, 17) == ':' and (mark == ':' or mark == ';')
    if left == -1 and not ours then value = false end
    if left == -1 or ours and left > longest_life then left = longest_life end
    -- Another client's life may be longer than a script can write as a number.
    if left > 1e12 then left = 1e12 end
  end
  out[2 * i - 1], out[2 * i] = value, left
end
return out
