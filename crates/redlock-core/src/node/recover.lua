-- Gives a master in quarantine back what it had lost, if the quarantine still stands that was seen.
--
-- KEYS[1]  the marker             then for each lock, lock and fence
-- ARGV[1]  the marker that must stand    ARGV[2]  how long a fence outlives its lock, in ms
--          then for each lock, value, ttl_ms and fence; no fence leaves what is there
-- Answers 1; 0 when another marker stands; 2 when another client has one of the locks. Then nothing was set.

local call, sub = redis.call, string.sub

if call('GET', KEYS[1]) ~= ARGV[1] then return 0 end

-- Other clients know of no quarantine, and count on what they have set since.
local stands = {}
for i = 2, #KEYS, 2 do
  local current = call('GET', KEYS[i])
  local ours = current and sub(current, 17, 17) == ':' and (sub(current, 58, 58) == ':' or sub(current, 58, 58) == ';')
  if current and not ours and current ~= ARGV[3 * i / 2] then return 2 end
  stands[i] = current
end

for i = 2, #KEYS, 2 do
  local a = 3 * i / 2
  local value, fence = ARGV[a], ARGV[a + 2]
  if fence ~= '' then
    -- As for a repair: what a release has reached is not set again. Nobody has it, then, until it would have ended.
    local t, last = sub(value, 1, 16), call('GET', KEYS[i + 1])
    local same = stands[i] and sub(stands[i], 1, 57) == sub(value, 1, 57)
    if last and last ~= t .. '+' and sub(last, 1, 16) >= t and not same then
      value, fence = t .. ':' .. string.rep('0', 40) .. ':', ''
    end
  end
  call('SET', KEYS[i], value, 'PX', ARGV[a + 1])
  if fence ~= '' then call('SET', KEYS[i + 1], fence, 'PX', ARGV[a + 1] + ARGV[2]) end
end
return 1
