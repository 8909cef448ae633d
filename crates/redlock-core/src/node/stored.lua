-- The values and times to live of a page of locks. KEYS: the locks. ARGV[1]: the longest value that a lock can have.
-- One without expiry is no lock.

local out = {}
for i, key in ipairs(KEYS) do
  local left = redis.call('PTTL', key)
  out[2 * i - 1] = left > 0 and redis.call('GET', key)
  out[2 * i] = left
  if out[2 * i - 1] and #out[2 * i - 1] > tonumber(ARGV[1]) then
    return redis.error_reply('ERR the value of a lock is too long')
  end
end
return out
