-- Puts one marker in the place of another, unless the process is another one by now. What is put, and when, is decided by
-- node/eligibility.rs; that it happens in one step is what makes its decisions hold.
--
-- Database 0 says which database the cluster uses on this master: gateways that use another one would not see its locks.
--
-- KEYS[1]  the marker    KEYS[2]  in database 0: the number of the cluster's database
-- ARGV[1]  the run_id that was looked at    ARGV[2]  the marker that must stand, '' for none    ARGV[3]  the new marker
-- ARGV[4]  the number of this database    ARGV[5]  this master's time when it was looked at, in microseconds; 0 for any
-- Answers 1 when it was put, 2 when another marker (or none) stands or the look was long ago, 3 when the process is another one; the number as text when the
-- cluster uses another database.

if string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') ~= ARGV[1] then return 3 end
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[2] then return 2 end
-- The marker of a quarantine says when it began, and none stood before the first: one that was stuck in a socket must not
-- begin a later quarantine.
local time = redis.call('TIME')
if ARGV[5] ~= '0' and time[1] * 1000000 + time[2] - ARGV[5] > 10000000 then return 2 end
if ARGV[4] ~= '0' then redis.call('SELECT', 0) end
local used = redis.call('GET', KEYS[2])
if not used then redis.call('SET', KEYS[2], ARGV[4]) end
if ARGV[4] ~= '0' then redis.call('SELECT', ARGV[4]) end
if used and used ~= ARGV[4] then return used end
redis.call('SET', KEYS[1], ARGV[3])
return 1
