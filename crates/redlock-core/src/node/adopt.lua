-- Gives a master in quarantine back what it had forgotten, if the quarantine still stands that was seen.
--
-- KEYS[1]  the marker             then for each lock, lock and fence
-- ARGV[1]  the marker that must stand    ARGV[2]  fence retention in ms
--          then for each lock, value, ttl_ms and fence: no value takes the lock away, no fence leaves what is there
-- Answers 1, or 0 when another marker stands.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 2, #KEYS, 2 do
  local a = 3 * i / 2
  local value, fence = ARGV[a], ARGV[a + 2]
  if value == '' then
    redis.call('DEL', KEYS[i])
  else
    if fence ~= '' then
      -- As for a heal: what a release has reached is not set again. Nobody has it, then, until it would have ended.
      local t = string.sub(value, 1, 16)
      local last, current = redis.call('GET', KEYS[i + 1]), redis.call('GET', KEYS[i])
      local stands = current and string.sub(current, 1, 57) == string.sub(value, 1, 57)
      if last and last ~= t .. '+' and string.sub(last, 1, 16) >= t and not stands then
        value, fence = t .. ':' .. string.rep('0', 40) .. ':', ''
      end
    end
    redis.call('SET', KEYS[i], value, 'PX', ARGV[a + 1])
  end
  if fence ~= '' then redis.call('SET', KEYS[i + 1], fence, 'PX', ARGV[2]) end
end
return 1
