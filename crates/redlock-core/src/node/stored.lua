-- Returns the values and times to live of a page of locks.
--
-- ARGV[1]  the longest value of a lock, in bytes
-- ARGV[2]  the longest life of a lock, in ms
-- ARGV[3...]  the locks' keys. As KEYS, a master in Cluster mode would refuse keys of several slots.
--
-- A value of another client without expiry is no lock, and is left out. If somebody removed or
-- prolonged the expiry of one of our locks by hand, the lock counts with the longest life. Its true
-- end is unknown then, and no holder was promised a longer life.

local longest_value, longest_life = tonumber(ARGV[1]), tonumber(ARGV[2])
local out = {}
for i = 1, #ARGV - 2 do
  local key = ARGV[i + 2]
  local left, value = redis.call('PTTL', key), false
  if left == -1 or left > 0 then
    -- A value that is longer than any of ours belongs to another client. Its first bytes are
    -- enough, because any value keeps the lock taken.
    local is_long = redis.call('STRLEN', key) > longest_value
    value = is_long and redis.call('GETRANGE', key, 0, longest_value - 1) or redis.call('GET', key)
    local mark = string.sub(value, 58, 58)
    local ours = not is_long and string.sub(value, 17, 17) == ':' and (mark == ':' or mark == ';')
    if left == -1 and not ours then value = false end
    if left == -1 or ours and left > longest_life then left = longest_life end
    -- The key of another client may live longer than a script can return as a number.
    if left > 1e12 then left = 1e12 end
  end
  out[2 * i - 1], out[2 * i] = value, left
end
return out
