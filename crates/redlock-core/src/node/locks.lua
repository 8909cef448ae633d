-- Many lock operations in one call. Each stands alone: an error in one is reported for it and touches no other. A call
-- without operations is the heartbeat: it writes the marker that stands there once more, and answers with the error if this
-- master takes no writes (it has no memory left, its disk is full, it has lost its replicas).
--
-- ARGV[1]  the call, and what is returned the answer, both codec as node/codec.rs says. A call that is not whole is refused before anything
-- of it runs. Each lock has its key, and its fence beside it: a record is T:grant:info, T 16 digits, grant 40: owner 32, nonce 8.
--
-- A fence outlives its lock, but no longer than its reasons: what is older than D is refused by the clock (see `fence_grace` in
-- node/rules.rs). It is T, or T and a mark:
--   T+         the lock of this T was extended here, and no release has been here since
--   T! or T!S+ there was no fence before this T, or S+
-- T is handled as the text it came as: Lua's tostring gives 1.76e+15. Comparisons are between numbers below 2^53.

local call, sub, num, byte = redis.pcall, string.sub, tonumber, string.byte
local pack, unpack = struct.pack, struct.unpack

local RULE_LOCK_IS_KEPT = true
local RULE_RELEASE_LEAVES_A_TOMBSTONE = true
local RULE_RELEASE_KEEPS_NEWER = true
local RULE_UNDO_IS_EXACT = true
local RULE_CLOCK_IS_CHECKED = true
local RULE_WATERMARK_IS_CHECKED = true
local RULE_MARKER_IS_CHECKED = true

local MALFORMED = redis.error_reply('ERR the call is malformed')
-- Of what stands under the key of a lock, in bytes; of another client's it may be anything.
local LONGEST = 8448

local codec = ARGV[1]
if byte(codec) ~= 1 then
  return redis.error_reply('ERR the call has version ' .. (byte(codec) or 'none') .. ' and not 1')
end
-- All of it is read before any of it runs. What is cut off is an error of unpack.
local _, marker_key, marker, channel, max_offset, grace, count, at = unpack('<BI2c0I2c0I2c0I8I8I2', codec)
local codes, locks, records, ttls, extras, t_nums = {}, {}, {}, {}, {}, {}
local RECORD, GRANT, NONE = 1, 2, 3
local A, E, H, I, N, R, U, V, W, X = byte('AEHINRUVWX', 1, -1)
local TAKES = { [A] = RECORD, [W] = RECORD, [H] = RECORD, [E] = GRANT, [R] = GRANT, [N] = GRANT, [U] = GRANT, [V] = GRANT, [X] = GRANT, [I] = NONE }
for i = 1, count do
  local code, lock, record, ttl
  code, lock, record, ttl, at = unpack('<BI2c0I2c0I4', codec, at)
  local takes = TAKES[code]
  if takes == RECORD and #record < 58 or takes == GRANT and #record ~= 57 or takes == NONE and record ~= '' or not takes then return MALFORMED end
  if (takes == RECORD or code == E) and (ttl < 10 or ttl > 86400000) then return MALFORMED end
  if takes ~= NONE and code ~= E then
    local t = num(sub(record, 1, 16))
    if not t or t < 1000000000000000 or t > 9007199254740991 then return MALFORMED end
    t_nums[i] = t
  end
  if code == W or code == N or code == V then
    extras[i], at = unpack('<I2c0', codec, at)
  elseif code == H then
    extras[i], at = unpack('<I8', codec, at)
  end
  codes[i], locks[i], records[i], ttls[i] = code, lock, record, ttl
end
if at ~= #codec + 1 then return MALFORMED end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local stands = call('GET', marker_key) == marker
local admitted = not RULE_MARKER_IS_CHECKED or stands

local function failed(reply)
  return type(reply) == 'table' and reply.err
end

local GRANTED, RELEASED, MISSING, QUARANTINED, CLOCK = '\1', '\5', '\6', '\8', '\9'
local HELD, FOUND, OTHER_GRANT = 2, 7, 11

local function held(code, lock, record)
  local pttl = call('PTTL', lock)
  record = sub(record, 1, LONGEST)
  return pack('<Bi8I4c0', code, failed(pttl) and 0 or pttl, #record, record)
end

local function error_of(reply)
  return pack('<BI2c0', 10, #reply.err, reply.err)
end

local function stale(fence)
  fence = sub(fence, 1, 64)
  return pack('<BI2c0', 3, #fence, fence)
end

local function extended(left)
  return pack('<Bi8', 4, left)
end

local NOBODYS = ':' .. string.rep('0', 40) .. ':'
local NO_NUMBER = { err = 'ERR the fence holds no number' }

-- Without a mark.
local function fence_number(text)
  return num(text) or num(sub(text, 1, 16))
end

-- A lock is never overwritten, not even for its owner: what was promised to an earlier request stands.
local function refuse(lock, current, record)
  if sub(current, 18, 49) ~= sub(record, 18, 49) then return held(HELD, lock, current) end
  if RULE_LOCK_IS_KEPT then return held(OTHER_GRANT, lock, current) end
end

local function acquire(lock, fence, record, ttl, t_num)
  if not admitted then return QUARANTINED end
  local t = sub(record, 1, 16)
  if RULE_CLOCK_IS_CHECKED and (t_num - now > max_offset or now - t_num > max_offset) then return CLOCK end

  local last = call('GET', fence)
  if failed(last) then return error_of(last) end
  local last_num = last and fence_number(last)
  if last and not last_num then return error_of(NO_NUMBER) end
  if RULE_WATERMARK_IS_CHECKED and last and last_num >= t_num then
    local current = call('GET', lock)
    if failed(current) then return error_of(current) end
    return current and refuse(lock, current, record) or stale(last)
  end

  local current = call('SET', lock, record, 'NX', 'GET', 'PX', ttl)
  if failed(current) then return error_of(current) end
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
  local set = call('SET', fence, text, 'PX', ttl + grace)
  if failed(set) then
    call('DEL', lock)
    return error_of(set)
  end
  return GRANTED
end

-- The first extension marks the lock (';' for ':' after the owner) and the fence ('+' after T). The marks are what a repair
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
  if not admitted then return QUARANTINED end
  local current = call('GET', lock)
  if failed(current) then return error_of(current) end
  if not current then return MISSING end
  -- T counts too: the owner may have lost the lock and been granted it again, and then this T had a gap.
  if sub(current, 1, 57) ~= grant then return held(HELD, lock, current) end
  local left = call('PTTL', lock)
  if failed(left) then return error_of(left) end
  local first, set = sub(current, 58, 58) == ':', nil
  local life = left > ttl and left or ttl
  -- Also where somebody has taken the expiry away.
  if first or left < ttl then
    -- Works when Redis is out of memory, and lets the rest of the script write; so before the marks.
    set = call('PEXPIRE', lock, life)
  end
  if first and not failed(set) then
    set = mark(lock, fence, current, life)
    -- The lock lives longer all the same, and its release counts on the fence. (Works without memory.)
    if failed(set) then call('PEXPIRE', fence, life + grace, 'GT') end
  end
  if failed(set) then return error_of(set) end
  return extended(life)
end

-- The majority that has just extended this T vouches for it: it may be old, but the extension must not be, or the fences that
-- would tell of what has happened since may be gone. A fence beyond T tells of a later grant or of the release of this one. A
-- fence at T tells that the lock was here; with the mark, that no release has been here since.
local function repair(lock, fence, record, ttl, t_num, began)
  if not admitted then return QUARANTINED end
  local t = sub(record, 1, 16)
  if RULE_CLOCK_IS_CHECKED and (t_num - now > max_offset or began - now > max_offset or now - began > max_offset) then
    return CLOCK
  end
  local current = call('GET', lock)
  if failed(current) then return error_of(current) end
  if current then
    if sub(current, 1, 57) == sub(record, 1, 57) then
      local left = call('PTTL', lock)
      if failed(left) then return error_of(left) end
      if left < 0 then return extended(ttl) end
      if left >= ttl then return extended(left) end
      -- The majority's copies live longer: they were extended while this node had no vote.
      local set = call('PEXPIRE', lock, ttl)
      if failed(set) then return error_of(set) end
      call('PEXPIRE', fence, ttl + grace, 'GT')
      return extended(ttl)
    end
    -- What keeps a lock free gives way: a majority of the others has this grant, so no other that it stands for can have one.
    -- An earlier lease of this very grant may be longer than what vouches for it.
    if sub(current, 17, 58) ~= NOBODYS then return held(HELD, lock, current) end
    local left = call('PTTL', lock)
    if failed(left) then return error_of(left) end
    if left > ttl then ttl = left end
  end
  local marked = t .. '+'
  local last = call('GET', fence)
  if failed(last) then return error_of(last) end
  if last and not fence_number(last) then return error_of(NO_NUMBER) end
  if RULE_WATERMARK_IS_CHECKED and last and last ~= marked and fence_number(last) >= t_num then return stale(last) end
  local set = call('SET', fence, sub(record, 58, 58) == ';' and marked or t, 'PX', ttl + grace)
  if failed(set) then return error_of(set) end
  set = call('SET', lock, record, 'PX', ttl)
  if failed(set) then return error_of(set) end
  return GRANTED
end

-- A try that failed takes its fence back, where it was granted: nobody has seen its T, and it must not keep a repair away
-- from a node that has lost the lock of whoever the try has failed against. Its acquire has run, so needs no tombstone.
local function undo(fence, t)
  local last = call('GET', fence)
  if failed(last) or not last then return last end
  if last == t .. '!' then return call('DEL', fence) end
  if sub(last, 1, 17) == t .. '!' then return call('SET', fence, sub(last, 18), 'KEEPTTL') end
end

-- Needs no eligibility: taking a lock away can never produce a second holder. Deletes before it sets anything: the
-- deletion works, and lets the rest of the script write, when Redis is out of memory.
local function release(lock, fence, grant, t_num, failed_try, only_this)
  local current = call('GET', lock)
  if failed(current) then return error_of(current) end
  local deleted = false
  local same = current and sub(current, 1, 57) == grant
  if same and sub(current, 58, 58) ~= ';' then
    local del = call('DEL', lock)
    if failed(del) then return error_of(del) end
    if failed_try then undo(fence, sub(grant, 1, 16)) end
    -- Otherwise the acquire that stored this very T has left the fence at T, which outlives the lock, and no repair takes an
    -- unmarked fence at T.
    return RELEASED
  end
  local spares = failed_try and RULE_UNDO_IS_EXACT
  local exact = spares or only_this and RULE_UNDO_IS_EXACT
  -- Extended, so confirmed: another request of the same owner counts on it.
  if spares and same then return held(HELD, lock, current) end
  local mine = current and not exact and sub(current, 18, 49) == sub(grant, 18, 49)
  if same or mine and (not RULE_RELEASE_KEEPS_NEWER or (num(sub(current, 1, 16)) or 0) <= t_num) then
    local del = call('DEL', lock)
    if failed(del) then return error_of(del) end
    deleted = true
  end
  if RULE_RELEASE_LEAVES_A_TOMBSTONE then
    -- Anybody can invent a T. Half of D is as far ahead as gateways learn to be; what is beyond would push the tokens of
    -- this lock, and of all gateways that see the fence, towards what nodes with other clocks refuse.
    if same or t_num - now <= max_offset / 2 then
      local last = call('GET', fence)
      if failed(last) then return error_of(last) end
      -- The mark of this T goes too: a repair may be in flight, which the undo of a try has nothing against. And a fence that could be taken back stays from now on, or
      -- this tombstone would go with it.
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
          if failed(left) then return error_of(left) end
          if left > life then life = left end
        end
        local set = call('SET', fence, text, 'PX', life)
        if failed(set) and not deleted then return error_of(set) end
      else
        -- What it counts on must not end before what was on its way.
        call('PEXPIRE', fence, grace, 'GT')
      end
    else
      -- Also where an older T was deleted: without its tombstone the release is not done.
      return CLOCK
    end
  end
  if deleted then return RELEASED end
  if current then return held(HELD, lock, current) end
  return MISSING
end

local function inspect(lock)
  local current = call('GET', lock)
  if failed(current) then return error_of(current) end
  if not current then return MISSING end
  return held(FOUND, lock, current)
end

-- A hint that cannot be published is lost, as hints may be.
local function publish(vote, when, hint)
  if hint and byte(vote) == when then call('PUBLISH', channel, hint) end
  return vote
end

local out = { pack('<BI8B', 1, now, admitted and 1 or 0) }
for i = 1, count do
  local code, lock, record = codes[i], locks[i], records[i]
  local fence, vote = '{' .. lock .. '}:fence', nil
  if code == A or code == W then
    vote = publish(acquire(lock, fence, record, ttls[i], t_nums[i]), HELD, extras[i])
  elseif code == E then
    vote = extend(lock, fence, record, ttls[i])
  elseif code == H then
    vote = repair(lock, fence, record, ttls[i], t_nums[i], extras[i])
  elseif code == I then
    vote = inspect(lock)
  else
    vote = publish(release(lock, fence, record, t_nums[i], code == U or code == V, code == X), 5, extras[i])
  end
  out[i + 1] = vote
end
if count == 0 then
  local set = stands and call('SET', marker_key, marker)
  local text = failed(set) or ''
  out[2] = pack('<I2c0', #text, text)
end
return table.concat(out)
