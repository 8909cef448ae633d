-- Runs many lock operations in one call. An error in one operation is its vote and affects no
-- other. A call without operations is the heartbeat: it writes the standing marker again. Its
-- answer contains the error if this master accepts no writes (no memory left, disk full, too few
-- replicas).
--
-- ARGV[1] is the call. The call and the returned answer are encoded as node/codec.rs describes. A
-- call that is not whole is refused before any part of it runs. Each lock has its key and a
-- watermark key. A record is T:grant:info; T has 16 digits, the grant 40 (owner 32, nonce 8).
--
-- A watermark outlives its lock until the clock check refuses everything that it guards against
-- (see `fence_grace` in node/rules.rs). It has one of these forms:
--   T      a grant or a release had this T
--   T+     the lock of this T was extended here, and no release has been here since
--   T!     granted with this T, and no watermark stood before
--   T!S+   granted with this T, and the watermark S+ stood before
-- T is kept as the text that it came as, because Lua's tostring gives 1.76e+15. Numbers below 2^53
-- are compared.

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
-- The longest value of a lock in a vote, in bytes. Another client's value may be longer.
local LONGEST_VALUE = 8448

local packed = ARGV[1]
if byte(packed) ~= 1 then
  return redis.error_reply('ERR the call has version ' .. (byte(packed) or 'none') .. ' and not 1')
end
-- The whole call is decoded before any operation runs. A call that is cut off makes unpack fail.
local _, marker_key, marker, channel, max_skew, grace, count, at =
  unpack('<BI2c0I2c0I2c0I8I8I2', packed)
local codes, locks, records, ttls, extras, t_nums = {}, {}, {}, {}, {}, {}
local RECORD, GRANT, NONE = 1, 2, 3
local A, E, H, I, N, R, U, V, W, X = byte('AEHINRUVWX', 1, -1)
local TAKES = {
  [A] = RECORD, [W] = RECORD, [H] = RECORD,
  [E] = GRANT, [R] = GRANT, [N] = GRANT, [U] = GRANT, [V] = GRANT, [X] = GRANT,
  [I] = NONE,
}
for i = 1, count do
  local code, lock, record, ttl
  code, lock, record, ttl, at = unpack('<BI2c0I2c0I4', packed, at)
  local takes = TAKES[code]
  if takes == RECORD and #record < 58 or takes == GRANT and #record ~= 57
    or takes == NONE and record ~= '' or not takes then
    return MALFORMED
  end
  if (takes == RECORD or code == E) and (ttl < 10 or ttl > 86400000) then return MALFORMED end
  if takes ~= NONE and code ~= E then
    local t = num(sub(record, 1, 16))
    if not t or t < 1000000000000000 or t > 9007199254740991 then return MALFORMED end
    t_nums[i] = t
  end
  if code == W or code == N or code == V then
    extras[i], at = unpack('<I2c0', packed, at)
  elseif code == H then
    extras[i], at = unpack('<I8', packed, at)
  end
  codes[i], locks[i], records[i], ttls[i] = code, lock, record, ttl
end
if at ~= #packed + 1 then return MALFORMED end

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
  record = sub(record, 1, LONGEST_VALUE)
  return pack('<Bi8I4c0', code, failed(pttl) and 0 or pttl, #record, record)
end

local function error_of(reply)
  return pack('<BI2c0', 10, #reply.err, reply.err)
end

local function stale(watermark)
  watermark = sub(watermark, 1, 64)
  return pack('<BI2c0', 3, #watermark, watermark)
end

local function extended(left)
  return pack('<Bi8', 4, left)
end

local PLACEHOLDER = ':' .. string.rep('0', 40) .. ':'
local NO_NUMBER = { err = 'ERR the watermark holds no number' }

-- The T of a watermark, without its mark.
local function watermark_number(text)
  return num(text) or num(sub(text, 1, 16))
end

-- A lock is never overwritten, not even for its owner: an earlier request relies on that grant.
local function refuse(lock, current, record)
  if sub(current, 18, 49) ~= sub(record, 18, 49) then return held(HELD, lock, current) end
  if RULE_LOCK_IS_KEPT then return held(OTHER_GRANT, lock, current) end
end

local function acquire(lock, watermark, record, ttl, t_num)
  if not admitted then return QUARANTINED end
  local t = sub(record, 1, 16)
  if RULE_CLOCK_IS_CHECKED and (t_num - now > max_skew or now - t_num > max_skew) then
    return CLOCK
  end

  local last = call('GET', watermark)
  if failed(last) then return error_of(last) end
  local last_num = last and watermark_number(last)
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
  local set = call('SET', watermark, text, 'PX', ttl + grace)
  if failed(set) then
    call('DEL', lock)
    return error_of(set)
  end
  return GRANTED
end

-- The first extension marks the lock (';' for ':' after the grant) and the watermark ('+' after T).
-- Repair and release rely on these marks. A lock that is never extended pays nothing for them. The
-- lock is marked before the watermark, because the release of an unmarked lock relies on an
-- unmarked watermark.
local function mark_extended(lock, watermark, current, ttl)
  local set = call('SET', lock, sub(current, 1, 57) .. ';' .. sub(current, 59), 'KEEPTTL')
  if failed(set) then return set end
  local t = sub(current, 1, 16)
  local last = call('GET', watermark)
  if failed(last) then return last end
  if last and sub(last, 1, 16) ~= t then return set end
  return call('SET', watermark, t .. '+', 'PX', ttl + grace)
end

local function extend(lock, watermark, grant, ttl)
  if not admitted then return QUARANTINED end
  local current = call('GET', lock)
  if failed(current) then return error_of(current) end
  if not current then return MISSING end
  -- T is compared too: the owner may have lost the lock and got it again with a new T. Then this T
  -- had a gap.
  if sub(current, 1, 57) ~= grant then return held(HELD, lock, current) end
  local left = call('PTTL', lock)
  if failed(left) then return error_of(left) end
  local first, set = sub(current, 58, 58) == ':', nil
  local life = left > ttl and left or ttl
  -- Also where somebody has removed the expiry.
  if first or left < ttl then
    -- Before the marks, because PEXPIRE works when Redis is out of memory, and lets the rest of the
    -- script write.
    set = call('PEXPIRE', lock, life)
  end
  if first and not failed(set) then
    set = mark_extended(lock, watermark, current, life)
    -- The lock lives longer anyway, and its release relies on the watermark. PEXPIRE works without
    -- memory.
    if failed(set) then call('PEXPIRE', watermark, life + grace, 'GT') end
  end
  if failed(set) then return error_of(set) end
  return extended(life)
end

-- A majority has just extended this T. T may be old, but the extension must be recent: otherwise
-- the watermark that records a later release or grant may have expired. A watermark beyond T means
-- a later grant, or the release of this one. A watermark at T means that the lock was here; with
-- '+', that no release has been here since.
local function repair(lock, watermark, record, ttl, t_num, began)
  if not admitted then return QUARANTINED end
  local t = sub(record, 1, 16)
  if RULE_CLOCK_IS_CHECKED
    and (t_num - now > max_skew or began - now > max_skew or now - began > max_skew) then
    return CLOCK
  end
  local current = call('GET', lock)
  if failed(current) then return error_of(current) end
  if current then
    if sub(current, 1, 57) == sub(record, 1, 57) then
      -- The majority's copies were extended while this node had no vote.
      if sub(record, 58, 58) == ';' then return extend(lock, watermark, sub(record, 1, 57), ttl) end
      local left = call('PTTL', lock)
      if failed(left) then return error_of(left) end
      if left < 0 then return extended(ttl) end
      if left >= ttl then return extended(left) end
      local set = call('PEXPIRE', lock, ttl)
      if failed(set) then return error_of(set) end
      call('PEXPIRE', watermark, ttl + grace, 'GT')
      return extended(ttl)
    end
    -- A placeholder that keeps a lock free gives way. A majority of the other masters has this
    -- grant, so no other grant can have one, and the placeholder guards none. An earlier lease of
    -- this same grant may be longer than the repair's TTL, so the longer one counts.
    if sub(current, 17, 58) ~= PLACEHOLDER then return held(HELD, lock, current) end
    local left = call('PTTL', lock)
    if failed(left) then return error_of(left) end
    if left > ttl then ttl = left end
  end
  local marked = t .. '+'
  local last = call('GET', watermark)
  if failed(last) then return error_of(last) end
  if last and not watermark_number(last) then return error_of(NO_NUMBER) end
  if RULE_WATERMARK_IS_CHECKED and last and last ~= marked and watermark_number(last) >= t_num then
    return stale(last)
  end
  local set = call('SET', watermark, sub(record, 58, 58) == ';' and marked or t, 'PX', ttl + grace)
  if failed(set) then return error_of(set) end
  set = call('SET', lock, record, 'PX', ttl)
  if failed(set) then return error_of(set) end
  return GRANTED
end

-- Undoes a failed proposal on a node that granted it: restores the earlier watermark. No client has
-- seen its T. T must not block a repair on a node that lost the competing owner's lock. The
-- proposal's acquire has already run here, so the undo needs no tombstone.
local function undo(watermark, t)
  local last = call('GET', watermark)
  if failed(last) or not last then return last end
  if last == t .. '!' then return call('DEL', watermark) end
  if sub(last, 1, 17) == t .. '!' then return call('SET', watermark, sub(last, 18), 'KEEPTTL') end
end

-- Needs no eligibility: deleting a lock can never produce a second holder. The release deletes
-- before it sets anything. The deletion works when Redis is out of memory, and lets the rest of the
-- script write.
local function release(lock, watermark, grant, t_num, is_undo, only_this)
  local current = call('GET', lock)
  if failed(current) then return error_of(current) end
  local deleted = false
  local same = current and sub(current, 1, 57) == grant
  if same and sub(current, 58, 58) ~= ';' then
    local del = call('DEL', lock)
    if failed(del) then return error_of(del) end
    if is_undo then undo(watermark, sub(grant, 1, 16)) end
    -- Otherwise the acquire that stored this T has left the watermark at T. That watermark outlives
    -- the lock, and no repair passes an unmarked watermark at T.
    return RELEASED
  end
  local exact_undo = is_undo and RULE_UNDO_IS_EXACT
  local exact = exact_undo or only_this and RULE_UNDO_IS_EXACT
  -- An extended grant is confirmed: another request of the same owner relies on it.
  if exact_undo and same then return held(HELD, lock, current) end
  local mine = current and not exact and sub(current, 18, 49) == sub(grant, 18, 49)
  if same
    or mine and (not RULE_RELEASE_KEEPS_NEWER or (num(sub(current, 1, 16)) or 0) <= t_num) then
    local del = call('DEL', lock)
    if failed(del) then return error_of(del) end
    deleted = true
  end
  if RULE_RELEASE_LEAVES_A_TOMBSTONE then
    -- Any client can invent a T. Gateways learn to be ahead by half of max_clock_skew at most. A
    -- larger T would push the tokens of all gateways that see this watermark further ahead. In the
    -- end nodes with other clocks would refuse them.
    if same or t_num - now <= max_skew / 2 then
      local last = call('GET', watermark)
      if failed(last) then return error_of(last) end
      -- A release also removes the '+' of this T, because a repair may be in flight; an undo need
      -- not prevent that repair. A provisional watermark ('!') becomes permanent, or its undo would
      -- remove this tombstone.
      local t, text = sub(grant, 1, 16), nil
      if not last or not exact_undo and last == t .. '+'
        or (watermark_number(last) or 0) < t_num then
        text = t
      elseif sub(last, 17, 17) == '!' then
        text = sub(last, 1, 16)
      end
      if text then
        local life = grace
        -- The watermark may guard another owner's lock, and must outlive that lock.
        if last and not same then
          local left = call('PTTL', watermark)
          if failed(left) then return error_of(left) end
          if left > life then life = left end
        end
        local set = call('SET', watermark, text, 'PX', life)
        if failed(set) and not deleted then return error_of(set) end
      else
        -- This release relies on the existing watermark, which must outlive operations in flight.
        call('PEXPIRE', watermark, grace, 'GT')
      end
    else
      -- Also where an older T was deleted: without its tombstone the release is incomplete.
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

-- A hint that cannot be published is lost, which hints may be.
local function publish(vote, when, hint)
  if hint and byte(vote) == when then call('PUBLISH', channel, hint) end
  return vote
end

local out = { pack('<BI8B', 1, now, admitted and 1 or 0) }
for i = 1, count do
  local code, lock, record = codes[i], locks[i], records[i]
  local watermark, vote = '{' .. lock .. '}:fence', nil
  if code == A or code == W then
    vote = publish(acquire(lock, watermark, record, ttls[i], t_nums[i]), HELD, extras[i])
  elseif code == E then
    vote = extend(lock, watermark, record, ttls[i])
  elseif code == H then
    vote = repair(lock, watermark, record, ttls[i], t_nums[i], extras[i])
  elseif code == I then
    vote = inspect(lock)
  else
    vote = release(lock, watermark, record, t_nums[i], code == U or code == V, code == X)
    vote = publish(vote, 5, extras[i])
  end
  out[i + 1] = vote
end
if count == 0 then
  local set = stands and call('SET', marker_key, marker)
  local text = failed(set) or ''
  out[2] = pack('<I2c0', #text, text)
end
return table.concat(out)
