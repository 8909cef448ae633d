-- The values and times to live of a page of locks. KEYS: the locks. ARGV[1]: the longest value that a lock can have.

local out = {}
for i, key in ipairs(KEYS) do
  local value = redis.call('GET', key)
  if value and #value > tonumber(ARGV[1]) then return redis.error_reply('ERR the value of a lock is too long: ' .. key) end
  out[2 * i - 1] = value
  out[2 * i] = redis.call('PTTL', key)
end
return out
