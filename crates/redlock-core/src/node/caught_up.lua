-- Notes that this master has caught up under its marker. The key ends with the data, like the marker.
--
-- KEYS[1]  the marker    KEYS[2]  the note    ARGV[1]  the marker that must stand

if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('SET', KEYS[2], ARGV[1]) end
