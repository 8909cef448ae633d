-- Writes the marker that lets this node vote, unless it was restarted or configured otherwise since it was looked at.
--
-- KEYS[1]  the marker
-- ARGV[1]  the run_id that was looked at    ARGV[2]  the configuration part of the marker, 'v1:<node set>:<max_ttl_ms>:'
-- Answers 1 when the marker is ours now, {2, marker} when another configuration's marker stands, {3, run_id} when the
-- process is another one by now.

local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
if run_id ~= ARGV[1] then return { 3, run_id or '' } end
local marker = redis.call('GET', KEYS[1])
if marker and string.sub(marker, 1, #ARGV[2]) ~= ARGV[2] then return { 2, marker } end
redis.call('SET', KEYS[1], ARGV[2] .. run_id)
return 1
