-- Restores lost locks on a master in quarantine, if the marker of the expected quarantine still
-- stands.
--
-- KEYS[1]  the marker's key
-- ARGV[1]  the incarnation of the marker that must stand
-- ARGV[2]  how long a watermark outlives its lock, in ms
-- ARGV[3...]  for each lock: lock key, watermark key, value, time to live in ms, watermark; ''
--          leaves the watermark as it is. As KEYS, a master in Cluster mode would refuse keys of
--          several slots.
--
-- Returns 1 when all locks are set, and 0 when another marker stands. Returns 2 when a Redlock
-- client that is no gateway has one of the locks. After 0 or 2 nothing was set.

local call, sub = redis.call, string.sub

if sub(call('GET', KEYS[1]) or '', -#ARGV[1]) ~= ARGV[1] then return 0 end

-- Clients that are no gateways ignore quarantines. They may have set locks here since the loss, and
-- rely on them. So their locks are not replaced.
local stands = {}
for i = 3, #ARGV, 5 do
  local current = call('GET', ARGV[i])
  local ours = current and sub(current, 17, 17) == ':'
    and (sub(current, 58, 58) == ':' or sub(current, 58, 58) == ';')
  if current and not ours and current ~= ARGV[i + 2] then return 2 end
  stands[i] = current
end

for i = 3, #ARGV, 5 do
  local lock, fence, value, life, watermark = unpack(ARGV, i, i + 4)
  if watermark ~= '' then
    -- As in a repair, a lock is not set again if the watermark shows that it was released here. A
    -- placeholder is set in its place, and keeps the lock free until the lock would have expired.
    local t, last = sub(value, 1, 16), call('GET', fence)
    local same = stands[i] and sub(stands[i], 1, 57) == sub(value, 1, 57)
    if last and sub(last, 1, 17) ~= t .. '+' and sub(last, 1, 16) >= t and not same then
      value, watermark = t .. ':' .. string.rep('0', 40) .. ':', ''
    end
  end
  call('SET', lock, value, 'PX', life)
  if watermark ~= '' then call('SET', fence, watermark, 'PX', life + ARGV[2]) end
end
return 1
