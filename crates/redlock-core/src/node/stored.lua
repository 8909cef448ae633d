-- The values and times to live of a page of locks. KEYS: the locks. ARGV[1]: the longest value that a lock can have. ARGV[2]: the
-- longest life of one, in ms.
-- What another client has set without expiry is no lock. One of ours that somebody took the expiry of was promised when it was
-- extended: it counts for the longest life, and so does what somebody prolonged by hand.

local longest, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local out = {}
for i, key in ipairs(KEYS) do
  local left, value = redis.call('PTTL', key), false
  if left == -1 or left > 0 then
    -- A longer value is of another client. Its beginning keeps the lock taken as well.
    local is_long = redis.call('STRLEN', key) > longest
    value = is_long and redis.call('GETRANGE', key, 0, longest - 1) or redis.call('GET', key)
    local mark = string.sub(value, 58, 58)
    local ours = not is_long and string.sub(value, 17, 17) == ':' and (mark == ':' or mark == ';')
    if left == -1 and not ours then value = false end
    if left == -1 or ours and left > most then left = most end
    -- Of another client: beyond what a script writes as a number.
    if left > 1e12 then left = 1e12 end
  end
  out[2 * i - 1], out[2 * i] = value, left
end
return out
