-- Notes that this master has caught up since its marker was set. A loss of data removes the note
-- together with the marker.
--
-- KEYS[1]  the marker's key    KEYS[2]  the note's key
-- ARGV[1]  the incarnation of the marker that must stand

if string.sub(redis.call('GET', KEYS[1]) or '', -#ARGV[1]) == ARGV[1] then
  redis.call('SET', KEYS[2], ARGV[1])
end
