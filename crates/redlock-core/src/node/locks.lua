-- Runs many lock operations in one call. If an operation fails, its error is its vote, and the
-- other operations still run. A call without operations is the heartbeat: it writes the standing
-- marker again, to test whether this master accepts writes. If it accepts none (no memory left,
-- disk full, too few replicas), the answer contains the error.
--
-- ARGV[1] is the call. The call and the returned answer are encoded as node/codec.rs describes. A
-- call that is cut off or malformed is refused before any of its operations runs.
--
-- Each lock has two keys: the lock key and the watermark key. The value of the lock key is a
-- record, T:grant:info. T has 16 decimal digits. The grant has 40 hexadecimal digits, 32 for the
-- owner and 8 for the nonce.
--
-- A watermark outlives its lock. It expires only when the clock check refuses all operations that
-- the watermark would refuse (see `fence_grace` in node/rules.rs). A watermark has one of these
-- forms:
--   T      a release or a repair had this T
--   T+     the grant with this T was extended here, and no release of it has run here since
--   T!     a grant with this T; its undo deletes the watermark, because none stood before
--   T!S@end, T!S+@end   a grant with this T; its undo restores the watermark S or S+, which stood
--                       before, until this end, in seconds since 1970
--   S@end, S+@end       such a restored watermark
-- T is stored as the text in which it arrived, because Lua's tostring would write 1.76e+15. To
-- compare two T, the script turns them into numbers. That is exact, because every T is below 2^53.

local call, sub, num, byte, find = redis.pcall, string.sub, tonumber, string.byte, string.find
local pack, unpack = struct.pack, struct.unpack

local RULE_LOCK_IS_KEPT = true
local RULE_RELEASE_LEAVES_A_TOMBSTONE = true
local RULE_RELEASE_KEEPS_NEWER = true
local RULE_UNDO_IS_EXACT = true
local RULE_CLOCK_IS_CHECKED = true
local RULE_WATERMARK_IS_CHECKED = true
local RULE_MARKER_IS_CHECKED = true
local RULE_REFUSED_SET_IS_UNDONE = true
local RULE_LIVES_BEGIN_WHEN_ASKED = true

-- The T at the start of a record or a watermark. tonumber alone would also take 17000000000000e2.
local function token(text)
  local t = sub(text, 1, 16)
  return #t == 16 and not find(t, '%D') and num(t) or nil
end

local MALFORMED = redis.error_reply('ERR the call is malformed')
-- The longest value of a lock in a vote, in bytes. Another client's value may be longer, and is
-- cut.
local LONGEST_VALUE = 8448
-- The same in a vote about the locks of a set that stand.
local LONGEST_OF_SET = 4160

local packed = ARGV[1]
if byte(packed) ~= 6 then
  return redis.error_reply('ERR the call has version ' .. (byte(packed) or 'none') .. ' and not 6')
end
-- The whole call is decoded before any operation runs. A call that is cut off makes unpack fail.
local _, marker_key, marker, channel, number_key, max_skew, grace, number, count, at =
  unpack('<BI2c0I2c0I2c0I2c0I8I8I8I2', packed)
local codes, locks, records, ttls, extras, t_nums, sets = {}, {}, {}, {}, {}, {}, {}
local RECORD, GRANT, NONE = 1, 2, 3
local A, E, H, I, K, N, R, U, V, W, X = byte('AEHIKNRUVWX', 1, -1)
local TAKES = {
  [A] = RECORD, [W] = RECORD, [H] = RECORD,
  [E] = GRANT, [K] = GRANT, [R] = GRANT, [N] = GRANT, [U] = GRANT, [V] = GRANT, [X] = GRANT,
  [I] = NONE,
}
for i = 1, count do
  local code, lock, record, ttl
  code, lock, record, ttl, at = unpack('<BI2c0I2c0I4', packed, at)
  -- A small letter is the operation on a set of locks.
  local is_set = code >= 97
  if is_set then code = code - 32 end
  local takes = TAKES[code]
  if takes == RECORD and #record < 58 or takes == GRANT and #record ~= 57
    or takes == NONE and record ~= '' or not takes or is_set and code == H then
    return MALFORMED
  end
  if (takes == RECORD or code == E or code == K) and (ttl < 10 or ttl > 86400000) then return MALFORMED end
  if takes ~= NONE and code ~= E then
    local t = token(record)
    if not t or t < 1000000000000000 or t > 9007199254740991 then return MALFORMED end
    t_nums[i] = t
  end
  if code == W or code == N or code == V then
    extras[i], at = unpack('<I2c0', packed, at)
  elseif code == E or code == H or code == K then
    extras[i], at = unpack('<I8', packed, at)
  end
  if is_set then
    local set, others = { lock }, nil
    others, at = unpack('<B', packed, at)
    for n = 2, others + 1 do
      set[n], at = unpack('<I2c0', packed, at)
    end
    sets[i] = set
  end
  codes[i], locks[i], records[i], ttls[i] = code, lock, record, ttl
end
if at ~= #packed + 1 then return MALFORMED end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- The marker of a call has no configuration in front, so it stays the same when an operator raises
-- the bounds there.
local stored_marker = call('GET', marker_key)
local stands = stored_marker and marker ~= '' and sub(stored_marker, -#marker) == marker
local admitted = not RULE_MARKER_IS_CHECKED or stands

local function failed(reply)
  return type(reply) == 'table' and reply.err
end

local GRANTED, RELEASED, MISSING, QUARANTINED, CLOCK = '\1', '\5', '\6', '\8', '\9'
local HELD, FOUND, OTHER_GRANT, OF_SET, FOUND_OF_SET, EACH = 2, 7, 11, 12, 13, 14

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

-- A lock is never overwritten, not even for its owner: an earlier request of the owner may rely on
-- the stored grant.
local function refuse(lock, current, record)
  if sub(current, 18, 49) ~= sub(record, 18, 49) then return held(HELD, lock, current) end
  if RULE_LOCK_IS_KEPT then return held(OTHER_GRANT, lock, current) end
end

-- A watermark without what an undo would restore, and without its end.
local function lasting(text)
  return sub(text, 1, sub(text, 17, 17) == '+' and 17 or 16)
end

-- The watermark over which a proposal is granted, with its end. The lock was free, so its watermark is
-- needed no longer than the tombstone of a release that arrives now. The end of a restored watermark
-- stays as it is. Otherwise each further proposal would prolong a watermark that keeps a repair out.
local function earlier(last)
  local kept = lasting(last)
  if sub(last, #kept + 1, #kept + 1) == '@' then return last end
  return kept .. '@' .. time[1] + math.ceil(grace / 1000) + 1
end

local function acquire(lock, watermark, record, ttl, t_num)
  if not admitted then return QUARANTINED end
  local t = sub(record, 1, 16)
  if RULE_CLOCK_IS_CHECKED and (t_num - now > max_skew or now - t_num > max_skew) then
    return CLOCK
  end

  local last = call('GET', watermark)
  if failed(last) then return error_of(last) end
  local last_num = last and token(last)
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
  local set = call('SET', watermark, t .. '!' .. (last and earlier(last) or ''), 'PX', ttl + grace)
  if failed(set) then
    call('DEL', lock)
    return error_of(set)
  end
  return GRANTED
end

-- The first extension marks the lock (';' for ':' after the grant) and the watermark ('+' after T).
-- Repair and release rely on these marks. A lock that is never extended pays nothing for them. The
-- lock is marked before the watermark, because the second write may fail for lack of memory. A
-- marked lock with an unmarked watermark is safe. An unmarked lock with a marked watermark is not:
-- its release leaves the watermark as it is. The '+' would then let a late repair pass.
local function mark_extended(lock, watermark, current, ttl)
  local set = call('SET', lock, sub(current, 1, 57) .. ';' .. sub(current, 59), 'KEEPTTL')
  if failed(set) then return set end
  local t = sub(current, 1, 16)
  local last = call('GET', watermark)
  if failed(last) then return last end
  if last and sub(last, 1, 16) ~= t then return set end
  return call('SET', watermark, t .. '+', 'PX', ttl + grace)
end

-- The part of a life that is left, in milliseconds. The life counts from when the gateway began to ask,
-- not from when this master runs the operation: a master that stood still meanwhile would keep the lock
-- for longer than anybody asked for. Clocks may differ by max_skew, so the life is never shortened by
-- that part of the delay.
local function left_of(life, began)
  local late = now - began - max_skew
  if not RULE_LIVES_BEGIN_WHEN_ASKED or late <= 0 then return life end
  return math.max(life - math.floor(late / 1000), 0)
end

local function extend(lock, watermark, grant, ttl, began)
  if not admitted then return QUARANTINED end
  ttl = left_of(ttl, began)
  if ttl == 0 then return CLOCK end
  local current = call('GET', lock)
  if failed(current) then return error_of(current) end
  if not current then return MISSING end
  -- The comparison includes T. The owner may have lost the lock and got it again with a new T.
  -- Somebody else may have had the lock in between, so the old T must not be extended.
  if sub(current, 1, 57) ~= grant then return held(HELD, lock, current) end
  local left = call('PTTL', lock)
  if failed(left) then return error_of(left) end
  local first, set = sub(current, 58, 58) == ':', nil
  local life = left > ttl and left or ttl
  -- PTTL returns -1 if somebody has removed the expiry. Then the expiry is set again.
  if first or left < ttl then
    -- PEXPIRE comes before the marks, because it works when Redis is out of memory. After a
    -- script's first write, Redis lets the rest of the script write too.
    set = call('PEXPIRE', lock, life)
  end
  if first and not failed(set) then
    set = mark_extended(lock, watermark, current, life)
    -- The marks failed, but the lock already lives longer. Its release relies on the watermark, so
    -- the watermark must live longer too. PEXPIRE works without memory.
    if failed(set) then call('PEXPIRE', watermark, life + grace, 'GT') end
  end
  if failed(set) then return error_of(set) end
  return extended(life)
end

-- The gateway has just seen that a majority has this grant, by extending it or by reading it. T may
-- be old, but that moment (`began`) must be recent. Otherwise the watermark of a later release or
-- grant may have expired here.
--
-- A watermark above T shows that a later grant was made or released here. A watermark at T without
-- '+' may show that this grant was released here. Both refuse the repair. A watermark T+ shows that
-- this grant was extended here and that no release has run here since. The repair passes then, and
-- also if the watermark is lower or missing.
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
      -- The record is marked as extended: the majority extended its copies while this node did not
      -- vote. So this copy is extended too.
      if sub(record, 58, 58) == ';' then
        return extend(lock, watermark, sub(record, 1, 57), ttl, began)
      end
      local left = call('PTTL', lock)
      if failed(left) then return error_of(left) end
      if left < 0 then return extended(ttl) end
      if left >= ttl then return extended(left) end
      local set = call('PEXPIRE', lock, ttl)
      if failed(set) then return error_of(set) end
      call('PEXPIRE', watermark, ttl + grace, 'GT')
      return extended(ttl)
    end
    -- Another record stands. Only a placeholder, which keeps the lock free from everybody, gives
    -- way to this grant. A majority of the masters has this grant, so no other grant can have a
    -- majority, and the placeholder protects none. The placeholder may stand for an earlier, longer
    -- lease of this same grant. So the longer of the two lives counts.
    if sub(current, 17, 58) ~= PLACEHOLDER then return held(HELD, lock, current) end
    local left = call('PTTL', lock)
    if failed(left) then return error_of(left) end
    if left > ttl then ttl = left end
  end
  local marked = t .. '+'
  local last = call('GET', watermark)
  if failed(last) then return error_of(last) end
  if last and not token(last) then return error_of(NO_NUMBER) end
  if RULE_WATERMARK_IS_CHECKED and last and sub(last, 1, 17) ~= marked and token(last) >= t_num then
    return stale(last)
  end
  local set = call('SET', watermark, sub(record, 58, 58) == ';' and marked or t, 'PX', ttl + grace)
  if failed(set) then return error_of(set) end
  set = call('SET', lock, record, 'PX', ttl)
  if failed(set) then return error_of(set) end
  return GRANTED
end

-- Restores the watermark from before a failed proposal that this node granted. An example shows why.
-- Another owner holds the lock with a smaller T on a majority, and this node lost its copy. If the
-- proposal's T stayed here, this node would refuse the repair of that copy. No client has seen the
-- proposal's T, so nobody relies on it. The proposal's acquire has already run
-- here, so the undo needs no tombstone.
local function undo(watermark, t)
  local last = call('GET', watermark)
  if failed(last) or not last or sub(last, 1, 17) ~= t .. '!' then return end
  local before, ends = sub(last, 18), string.match(last, '@(%d+)$')
  local left = ends and ends * 1000 - math.floor(now / 1000)
  if before == '' or left and left <= 0 then
    call('DEL', watermark)
  elseif left then
    call('SET', watermark, before, 'PX', left)
  else
    -- Somebody else has written it.
    call('SET', watermark, before, 'KEEPTTL')
  end
end

-- Runs even if the marker of the call does not stand: deleting a lock can never produce a second
-- holder. The release deletes before it sets anything, because DEL works when Redis is out of
-- memory. After a script's first write, Redis lets the rest of the script write too.
local function release(lock, watermark, grant, t_num, is_undo, only_this)
  local current = call('GET', lock)
  if failed(current) then return error_of(current) end
  local deleted = false
  local same = current and sub(current, 1, 57) == grant
  if same and sub(current, 58, 58) ~= ';' then
    local del = call('DEL', lock)
    if failed(del) then return error_of(del) end
    if is_undo then undo(watermark, sub(grant, 1, 16)) end
    -- A release that is no undo need not set the watermark. The acquire that stored this T left the
    -- watermark at T, without a '+'. That watermark outlives the lock, and refuses every repair of
    -- this T.
    return RELEASED
  end
  local exact_undo = is_undo and RULE_UNDO_IS_EXACT
  local exact = exact_undo or only_this and RULE_UNDO_IS_EXACT
  -- An undo spares an extended grant: another request of the same owner has confirmed the grant by
  -- the extension, and relies on it.
  if exact_undo and same then return held(HELD, lock, current) end
  local mine = current and not exact and sub(current, 18, 49) == sub(grant, 18, 49)
  if same
    or mine and (not RULE_RELEASE_KEEPS_NEWER or (token(current) or 0) <= t_num) then
    local del = call('DEL', lock)
    if failed(del) then return error_of(del) end
    deleted = true
  end
  if RULE_RELEASE_LEAVES_A_TOMBSTONE then
    -- A tombstone with a T far ahead of this master's clock is not written, except for the lock
    -- that stood here. Far is more than half of max_clock_skew. Any client can invent a T, and a gateway that sees this
    -- watermark mints larger tokens. A watermark further ahead would push the tokens of all
    -- gateways so far ahead that nodes with slower clocks refuse them.
    if same or t_num - now <= max_skew / 2 then
      local last = call('GET', watermark)
      if failed(last) then return error_of(last) end
      -- A release turns T+ into T, because a repair of this grant may be in flight and must be
      -- refused. An undo leaves T+ as it is: another request has extended and so confirmed this
      -- grant, and its repair may pass. A provisional watermark loses its '!' and what follows.
      -- Otherwise the undo of that proposal would remove this tombstone. A restored watermark loses
      -- its end, which may be too early.
      local t, text = sub(grant, 1, 16), nil
      if not last or not exact_undo and sub(last, 1, 17) == t .. '+'
        or (token(last) or 0) < t_num then
        text = t
      elseif lasting(last) ~= last then
        text = lasting(last)
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
        if failed(set) then return error_of(set) end
      else
        -- The existing watermark already refuses what a tombstone would refuse. It must outlive
        -- operations in flight, as a tombstone would.
        call('PEXPIRE', watermark, grace, 'GT')
      end
    else
      -- This is the vote even if a lock with an older T was deleted above: without its tombstone
      -- the release is incomplete.
      return CLOCK
    end
  end
  if deleted then return RELEASED end
  if current then return held(HELD, lock, current) end
  return MISSING
end

-- Replaces a grant by a placeholder, with the grant behind it. The watermark loses the mark of an
-- extension, because a repair of the grant may be in flight and must be refused.
local function keep_free(lock, watermark, grant, ttl, t_num, began)
  ttl = left_of(ttl, began)
  local current = call('GET', lock)
  if failed(current) then return error_of(current) end
  if ttl == 0 or not current or sub(current, 1, 57) ~= grant then
    return release(lock, watermark, grant, t_num, false, false)
  end
  -- A release of another owner may have left a larger T, or one that must live longer.
  local last = call('GET', watermark)
  if failed(last) then return error_of(last) end
  local t, text, life = sub(grant, 1, 16), sub(grant, 1, 16), ttl + grace
  if last then
    if (token(last) or 0) > t_num then text = sub(last, 1, 16) end
    local left = call('PTTL', watermark)
    if failed(left) then return error_of(left) end
    if left > life then life = left end
  end
  -- PEXPIRE comes first, because it works without memory, and the other writes pass after it.
  local set = call('PEXPIRE', lock, ttl)
  if failed(set) then return error_of(set) end
  call('PEXPIRE', watermark, life, 'GT')
  set = call('SET', watermark, text, 'PX', life)
  if failed(set) then return error_of(set) end
  set = call('SET', lock, t .. PLACEHOLDER .. sub(grant, 18), 'PX', ttl)
  if failed(set) then return error_of(set) end
  return RELEASED
end

local function inspect(lock)
  local current = call('GET', lock)
  if failed(current) then return error_of(current) end
  if not current then return MISSING end
  return held(FOUND, lock, current)
end

-- Reads every lock of a set. The vote has those that stand. If one cannot be read, its error is the
-- vote.
local function inspect_set(set)
  local stand = { '' }
  for place, lock in ipairs(set) do
    local current = call('GET', lock)
    if failed(current) then return error_of(current) end
    if current then
      local pttl = call('PTTL', lock)
      current = sub(current, 1, LONGEST_OF_SET)
      stand[#stand + 1] =
        pack('<Bi8I4c0', place - 1, failed(pttl) and 0 or pttl, #current, current)
    end
  end
  stand[1] = pack('<BI2', FOUND_OF_SET, #stand - 1)
  return table.concat(stand)
end

-- The vote of a set, about its lock at this place. Only votes that show a holder name the lock.
local function of_lock(place, vote)
  local code = byte(vote)
  if place == 1 or code ~= HELD and code ~= OTHER_GRANT then return vote end
  return pack('<BB', OF_SET, place - 1) .. vote
end

local function watermark_of(lock)
  return '{' .. lock .. '}:fence'
end

-- Acquires all locks of a set, or none: if one refuses or fails, the grants before it are undone
-- exactly. The vote is that of the lock that refused.
local function acquire_set(set, record, ttl, t_num)
  for place, lock in ipairs(set) do
    local vote = acquire(lock, watermark_of(lock), record, ttl, t_num)
    if vote ~= GRANTED then
      if RULE_REFUSED_SET_IS_UNDONE then
        for before = 1, place - 1 do
          local granted = set[before]
          release(granted, watermark_of(granted), sub(record, 1, 57), t_num, true, false)
        end
      end
      return of_lock(place, vote)
    end
  end
  return GRANTED
end

-- Undoes a grant on every lock of a set. If the undo fails on a lock, that failure is the vote, and the
-- gateway retries the undo. Otherwise the vote is 5 (released) if any lock was released.
local function undo_set(set, grant, t_num)
  local first, rank = nil, -1
  for place, lock in ipairs(set) do
    local vote = release(lock, watermark_of(lock), grant, t_num, true, false)
    local code, of_vote = byte(vote), 0
    if code >= 8 and code <= 10 then of_vote = 2 elseif code == 5 then of_vote = 1 end
    if of_vote > rank then first, rank = of_lock(place, vote), of_vote end
  end
  return first
end

-- Extends, releases or keeps free one lock, or undoes its grant.
local function change(code, lock, record, ttl, t_num, extra)
  local watermark = watermark_of(lock)
  if code == E then return extend(lock, watermark, record, ttl, extra) end
  if code == K then return keep_free(lock, watermark, record, ttl, t_num, extra) end
  return release(lock, watermark, record, t_num, code == U or code == V, code == X)
end

-- Runs `change` on each lock of a set. Returns the vote with all votes, and whether a lock was extended
-- or released.
local function change_each(set, code, ...)
  if code == E and not admitted then return QUARANTINED, false end
  local votes, any = {}, false
  for at, lock in ipairs(set) do
    local vote = change(code, lock, ...)
    local of_vote = byte(vote)
    any = any or of_vote == 4 or of_vote == 5
    votes[at] = vote
  end
  return pack('<BI2', EACH, #set) .. table.concat(votes), any
end

local out, is_yes = {}, count == 0
for i = 1, count do
  local code, lock, record = codes[i], locks[i], records[i]
  local set, vote, any = sets[i], nil, false
  if code == A or code == W then
    vote = set and acquire_set(set, record, ttls[i], t_nums[i])
      or acquire(lock, watermark_of(lock), record, ttls[i], t_nums[i])
  elseif code == H then
    vote = repair(lock, watermark_of(lock), record, ttls[i], t_nums[i], extras[i])
  elseif code == I then
    vote = set and inspect_set(set) or inspect(lock)
  elseif set and (code == U or code == V) then
    vote = undo_set(set, record, t_nums[i])
  elseif set then
    vote, any = change_each(set, code, record, ttls[i], t_nums[i], extras[i])
  else
    vote = change(code, lock, record, ttls[i], t_nums[i], extras[i])
  end
  local of_vote = byte(vote)
  -- The hint of W says who waits for the first lock, so that lock must have refused. The hint of a
  -- release is published if any lock was released. An error of PUBLISH is ignored: the hint is lost
  -- then, and nobody relies on hints.
  if code == W and of_vote == HELD or (code == N or code == V) and (any or of_vote == 5) then
    call('PUBLISH', channel, extras[i])
  end
  is_yes = is_yes or any or of_vote == 1 or of_vote == 4 or of_vote == 5
  out[i + 1] = vote
end
-- The file gets the number in the same transaction as the changes of the call. So a file that lacks
-- the changes of an answered call has a smaller number. It is kept for 25 h, as NUMBER_KEPT_MS in
-- node/codec.rs says.
local flags = admitted and 1 or 0
if admitted and number > 0 and is_yes then
  local set = call('SET', number_key, string.format('%.0f', number), 'PX', 90000000)
  if not failed(set) then flags = flags + 2 end
end
out[1] = pack('<BI8B', 6, now, flags)
if count == 0 then
  local set = stands and call('SET', marker_key, stored_marker)
  local text = failed(set) or ''
  out[2] = pack('<I2c0', #text, text)
end
return table.concat(out)
