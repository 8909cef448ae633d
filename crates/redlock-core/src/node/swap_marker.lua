-- Replaces one marker by another in one step, unless the master was restarted since the probe.
-- node/eligibility.rs decides which marker to set, and when. It decides by the process and the
-- marker that a probe found. This script checks both and sets the new marker in one atomic step.
--
-- A key in database 0 names the database that the cluster uses on this master. A gateway with
-- another database would not see the cluster's locks, so it is refused.
--
-- KEYS[1]  the marker's key
-- KEYS[2]  the key, in database 0, that names the cluster's database
-- ARGV[1]  the run_id that was probed
-- ARGV[2]  the marker that must stand, '' for none
-- ARGV[3]  the new marker
-- ARGV[4]  the number of this database
-- ARGV[5]  this master's time at the probe, in microseconds; 0 skips the check of its age
--
-- Returns
--   1     the new marker stands
--   2     another marker (or none) stands, or the probe was more than 10 s ago
--   3     the process is not the one that was probed
--   text  the number of the database that the cluster uses, if it is another one

if string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') ~= ARGV[1] then return 3 end
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[2] then return 2 end
-- A quarantine marker contains the time at which the quarantine began. A swap that was stuck in a
-- socket must not set that old time after a later loss of data. ARGV[2] alone cannot prevent this,
-- because it is '' after every loss of data.
local time = redis.call('TIME')
if ARGV[5] ~= '0' and time[1] * 1000000 + time[2] - ARGV[5] > 10000000 then return 2 end
if ARGV[4] ~= '0' then redis.call('SELECT', 0) end
local used = redis.call('GET', KEYS[2])
if not used then redis.call('SET', KEYS[2], ARGV[4]) end
if ARGV[4] ~= '0' then redis.call('SELECT', ARGV[4]) end
if used and used ~= ARGV[4] then return used end
redis.call('SET', KEYS[1], ARGV[3])
return 1
