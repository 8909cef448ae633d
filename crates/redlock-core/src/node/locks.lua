-- Many lock operations in one call. Each stands alone: an error in one is reported for it and touches no other. A call
-- without operations is the heartbeat: it writes the marker that stands there once more, and answers with the error if this
-- master takes no writes (it has no memory left, its disk is full, it has lost its replicas).
--
-- KEYS[1]  the marker of this node
-- ARGV[1]  the marker that admits this gateway     ARGV[2]  D in microseconds     ARGV[3]  how long a fence outlives what it is for, in ms
-- then for each operation, its arguments from ARGV[4] and its keys from KEYS[2]:
--   A record ttl_ms | lock fence     acquire; record = T:grant:info, T 16 digits, grant 40: owner 32, nonce 8
--   W record ttl_ms channel hint | lock fence    the same, and when it is held: publish the hint
--   E T:grant ttl_ms | lock fence    extend
--   H record ttl_ms began | lock fence     heal: set an extended lock again where it is gone; the extension began then, in microseconds since 1970
--   R T:grant       | lock fence     release
--   N T:grant channel hint | lock fence          the same, and when it was released: publish the hint
--   U T:grant       | lock fence     undo of a try that failed, whose T nobody has seen: of exactly this grant, unless it was extended
--   V T:grant channel hint | lock fence          the same, and when it was released: publish the hint
--   X T:grant       | lock fence     release of exactly this grant, extended or not
--   I               | lock           inspect
-- Answers: this node's time in microseconds, 1 or 0 for whether the marker admits the gateway, then for each operation a number or a list that begins with one:
--   1 granted   2 held (pttl, record)   11 held by another grant of the same owner (pttl, record)   3 stale (fence)   4 extended   5 released   6 missing   7 found (pttl, record)
--   8 quarantined   9 clock   10 error (text)
--
-- A fence outlives its lock, but no longer than its reasons: what is older than D is refused by the clock (see `fence_grace` in
-- node/rules.rs). It is T, or T and a mark:
--   T+         the lock of this T was extended here, and no release has been here since
--   T! or T!S+ there was no fence before this T, or S+
-- T is handled as the text it came as: Lua's tostring gives 1.76e+15. Comparisons are between numbers below 2^53.

local call, sub, num = redis.pcall, string.sub, tonumber

local RULE_LOCK_IS_KEPT = true
local RULE_RELEASE_IS_A_BARRIER = true
local RULE_RELEASE_KEEPS_NEWER = true
local RULE_UNDO_IS_EXACT = true
local RULE_CLOCK_IS_CHECKED = true
local RULE_FENCE_IS_CHECKED = true
local RULE_MARKER_IS_CHECKED = true

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local stands = call('GET', KEYS[1]) == ARGV[1]
local admitted = not RULE_MARKER_IS_CHECKED or stands
local max_offset, grace = num(ARGV[2]), num(ARGV[3])

local function failed(reply)
  return type(reply) == 'table' and reply.err
end

local function held(code, lock, record)
  local pttl = call('PTTL', lock)
  return { code, failed(pttl) and 0 or pttl, record }
end

-- Without a mark.
local function fence_number(text)
  return num(text) or num(sub(text, 1, 16))
end

-- A lock is never overwritten, not even for its owner: what was promised to an earlier request stands.
local function refuse(lock, current, record)
  if sub(current, 18, 49) ~= sub(record, 18, 49) then return held(2, lock, current) end
  if RULE_LOCK_IS_KEPT then return held(11, lock, current) end
end

local function acquire(lock, fence, record, ttl)
  if not admitted then return 8 end
  local t = sub(record, 1, 16)
  local t_num = num(t)
  if RULE_CLOCK_IS_CHECKED and (t_num - now > max_offset or now - t_num > max_offset) then return 9 end

  local last = call('GET', fence)
  if failed(last) then return { 10, last.err } end
  local last_num = last and fence_number(last)
  if last and not last_num then return { 10, 'ERR the fence holds no number' } end
  if RULE_FENCE_IS_CHECKED and last and last_num >= t_num then
    local current = call('GET', lock)
    if failed(current) then return { 10, current.err } end
    return current and refuse(lock, current, record) or { 3, last }
  end

  local current = call('SET', lock, record, 'NX', 'GET', 'PX', ttl)
  if failed(current) then return { 10, current.err } end
  if current then
    local refused = refuse(lock, current, record)
    if refused then return refused end
    call('SET', lock, record, 'PX', ttl)
  end
  local text = t
  if not last then
    text = t .. '!'
  elseif sub(last, 17) == '+' then
    text = t .. '!' .. last
  end
  local set = call('SET', fence, text, 'PX', num(ttl) + grace)
  if failed(set) then
    call('DEL', lock)
    return { 10, set.err }
  end
  return 1
end

-- The first extension marks the lock (';' for ':' after the owner) and the fence ('+' after T). The marks are what a heal
-- and a release tell each other by, see there; a lock that is never extended costs nothing for it.
-- The lock before the fence: the release of an unmarked lock counts on an unmarked fence.
local function mark(lock, fence, current, ttl)
  local set = call('SET', lock, sub(current, 1, 57) .. ';' .. sub(current, 59), 'KEEPTTL')
  if failed(set) then return set end
  local t = sub(current, 1, 16)
  local last = call('GET', fence)
  if failed(last) then return last end
  if last and sub(last, 1, 16) ~= t then return set end
  return call('SET', fence, t .. '+', 'PX', ttl + grace)
end

local function extend(lock, fence, grant, ttl)
  if not admitted then return 8 end
  local current = call('GET', lock)
  if failed(current) then return { 10, current.err } end
  if not current then return 6 end
  -- T counts too: the owner may have lost the lock and been granted it again, and then this T had a gap.
  if sub(current, 1, 57) ~= grant then return held(2, lock, current) end
  local left = call('PTTL', lock)
  if failed(left) then return { 10, left.err } end
  local first, set = sub(current, 58, 58) == ':', nil
  if first or left >= 0 and left < num(ttl) then
    -- Works when Redis is out of memory, and lets the rest of the script write; so before the marks.
    set = call('PEXPIRE', lock, left > num(ttl) and left or ttl)
  end
  if first and not failed(set) then
    local life = left > num(ttl) and left or num(ttl)
    set = mark(lock, fence, current, life)
    -- The lock lives longer all the same, and its release counts on the fence. (Works without memory.)
    if failed(set) then call('PEXPIRE', fence, life + grace, 'GT') end
  end
  if failed(set) then return { 10, set.err } end
  return 4
end

-- The majority that has just extended this T vouches for it: it may be old, but the extension must not be, or the fences that
-- would tell of what has happened since may be gone. A fence beyond T tells of a later grant or of the release of this one. A
-- fence at T tells that the lock was here; with the mark, that no release has been here since.
local function heal(lock, fence, record, ttl, began)
  if not admitted then return 8 end
  local t = sub(record, 1, 16)
  local t_num, began_num = num(t), num(began)
  if RULE_CLOCK_IS_CHECKED and (t_num - now > max_offset or began_num - now > max_offset or now - began_num > max_offset) then
    return 9
  end
  local current = call('GET', lock)
  if failed(current) then return { 10, current.err } end
  if current then
    if sub(current, 1, 57) == sub(record, 1, 57) then return 4 end
    return held(2, lock, current)
  end
  local marked = t .. '+'
  local last = call('GET', fence)
  if failed(last) then return { 10, last.err } end
  if last and not fence_number(last) then return { 10, 'ERR the fence holds no number' } end
  if RULE_FENCE_IS_CHECKED and last and last ~= marked and fence_number(last) >= t_num then return { 3, last } end
  local set = call('SET', fence, marked, 'PX', num(ttl) + grace)
  if failed(set) then return { 10, set.err } end
  set = call('SET', lock, sub(record, 1, 57) .. ';' .. sub(record, 59), 'PX', ttl)
  if failed(set) then return { 10, set.err } end
  return 1
end

-- A try that failed takes its fence back, where it was granted: nobody has seen its T, and it must not keep a heal away
-- from a node that has lost the lock of whoever the try has failed against. Its acquire has run, so needs no barrier.
local function undo(fence, t)
  local last = call('GET', fence)
  if failed(last) or not last then return last end
  if last == t .. '!' then return call('DEL', fence) end
  if sub(last, 1, 17) == t .. '!' then return call('SET', fence, sub(last, 18), 'KEEPTTL') end
end

-- Needs no admission: taking a lock away can never produce a second holder. Deletes before it sets anything: the
-- deletion works, and lets the rest of the script write, when Redis is out of memory.
local function release(lock, fence, grant, failed_try, only_this)
  local current = call('GET', lock)
  if failed(current) then return { 10, current.err } end
  local deleted = false
  local same = current and sub(current, 1, 57) == grant
  if same and sub(current, 58, 58) ~= ';' then
    local del = call('DEL', lock)
    if failed(del) then return { 10, del.err } end
    if failed_try then undo(fence, sub(grant, 1, 16)) end
    -- Otherwise the acquire that stored this very T has left the fence at T, which outlives the lock, and no heal takes an
    -- unmarked fence at T.
    return 5
  end
  local spares = failed_try and RULE_UNDO_IS_EXACT
  local exact = spares or only_this and RULE_UNDO_IS_EXACT
  -- Extended, so confirmed: another request of the same owner counts on it.
  if spares and same then return held(2, lock, current) end
  local t_num = num(sub(grant, 1, 16))
  local mine = current and not exact and sub(current, 18, 49) == sub(grant, 18, 49)
  if same or mine and (not RULE_RELEASE_KEEPS_NEWER or (num(sub(current, 1, 16)) or 0) <= t_num) then
    local del = call('DEL', lock)
    if failed(del) then return { 10, del.err } end
    deleted = true
  end
  if RULE_RELEASE_IS_A_BARRIER then
    -- Anybody can invent a T. Half of D is as far ahead as gateways learn to be; what is beyond would push the tokens of
    -- this lock, and of all gateways that see the fence, towards what nodes with other clocks refuse.
    if same or t_num - now <= max_offset / 2 then
      local last = call('GET', fence)
      if failed(last) then return { 10, last.err } end
      -- The mark of this T goes too: a heal may be in flight, which the undo of a try has nothing against. And a fence that could be taken back stays from now on, or
      -- this barrier would go with it.
      local t, text = sub(grant, 1, 16), nil
      if not last or not spares and last == t .. '+' or (fence_number(last) or 0) < t_num then
        text = t
      elseif sub(last, 17, 17) == '!' then
        text = sub(last, 1, 16)
      end
      if text then
        local life = grace
        -- What stood there may be for a lock of somebody else, which it has to outlive.
        if last and not same then
          local left = call('PTTL', fence)
          if failed(left) then return { 10, left.err } end
          if left > life then life = left end
        end
        local set = call('SET', fence, text, 'PX', life)
        if failed(set) and not deleted then return { 10, set.err } end
      else
        -- What it counts on must not end before what was on its way.
        call('PEXPIRE', fence, grace, 'GT')
      end
    else
      -- Also where an older T was deleted: without its barrier the release is not done.
      return 9
    end
  end
  if deleted then return 5 end
  if current then return held(2, lock, current) end
  return 6
end

local function inspect(lock)
  local current = call('GET', lock)
  if failed(current) then return { 10, current.err } end
  if not current then return 6 end
  return held(7, lock, current)
end

-- A hint that cannot be published is lost, as hints may be.
local function publish(vote, when, channel, hint)
  if (type(vote) == 'table' and vote[1] or vote) == when then call('PUBLISH', channel, hint) end
  return vote
end

local out, n, k, a = { now, admitted and 1 or 0 }, 2, 2, 4
if not ARGV[4] and stands then
  local set = call('SET', KEYS[1], ARGV[1])
  if failed(set) then out[3] = set.err end
end
while ARGV[a] do
  local op = ARGV[a]
  n = n + 1
  if op == 'A' then
    out[n] = acquire(KEYS[k], KEYS[k + 1], ARGV[a + 1], ARGV[a + 2])
    k, a = k + 2, a + 3
  elseif op == 'R' or op == 'U' or op == 'X' then
    out[n] = release(KEYS[k], KEYS[k + 1], ARGV[a + 1], op == 'U', op == 'X')
    k, a = k + 2, a + 2
  elseif op == 'W' then
    out[n] = publish(acquire(KEYS[k], KEYS[k + 1], ARGV[a + 1], ARGV[a + 2]), 2, ARGV[a + 3], ARGV[a + 4])
    k, a = k + 2, a + 5
  elseif op == 'N' or op == 'V' then
    out[n] = publish(release(KEYS[k], KEYS[k + 1], ARGV[a + 1], op == 'V'), 5, ARGV[a + 2], ARGV[a + 3])
    k, a = k + 2, a + 4
  elseif op == 'H' then
    out[n] = heal(KEYS[k], KEYS[k + 1], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3])
    k, a = k + 2, a + 4
  elseif op == 'E' then
    out[n] = extend(KEYS[k], KEYS[k + 1], ARGV[a + 1], ARGV[a + 2])
    k, a = k + 2, a + 3
  else
    out[n] = inspect(KEYS[k])
    k, a = k + 1, a + 1
  end
end
return out
