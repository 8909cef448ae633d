-- Gives a master in quarantine back what it had forgotten, if the quarantine still stands that was seen.
--
-- KEYS[1]  the marker             then for each lock, lock and fence
-- ARGV[1]  the marker that must stand    ARGV[2]  fence retention in ms
--          then for each lock, value, ttl_ms and fence: no value takes the lock away, no fence leaves what is there
-- Answers 1, or 0 when another marker stands.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 2, #KEYS, 2 do
  local a = 3 * i / 2
  if ARGV[a] == '' then
    redis.call('DEL', KEYS[i])
  else
    redis.call('SET', KEYS[i], ARGV[a], 'PX', ARGV[a + 1])
  end
  if ARGV[a + 2] ~= '' then redis.call('SET', KEYS[i + 1], ARGV[a + 2], 'PX', ARGV[2]) end
end
return 1
