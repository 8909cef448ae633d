-- Puts one marker in the place of another, unless the process is another one by now. What is put, and when, is decided by
-- node/admission.rs; that it happens in one step is what makes its decisions hold.
--
-- KEYS[1]  the marker
-- ARGV[1]  the run_id that was looked at    ARGV[2]  the marker that must stand, '' for none    ARGV[3]  the new marker
-- Answers 1 when it was put, 2 when another marker (or none) stands, 3 when the process is another one.

if string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') ~= ARGV[1] then return 3 end
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[2] then return 2 end
redis.call('SET', KEYS[1], ARGV[3])
return 1
