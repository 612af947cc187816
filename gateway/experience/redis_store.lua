-- The experience of one namespace: entries, leases and closed groups. One script, so that each operation is atomic.
--
-- KEYS[1]: the prefix. ARGV: the operation, the gateway that calls it, and the operation's own arguments.
--
-- PREFIX:totals           hash    seq, revision, entries, leased, bytes
-- PREFIX:entry:SEQ        hash    session, group, oldest, facts, uses, lease, gateway, bytes, edits, body
-- PREFIX:sessions         hash    session -> SEQ
-- PREFIX:lease:ID         hash    reader, uses_max, seqs (separated by blanks), gateway
-- PREFIX:leases           zset    ID -> its end in milliseconds of this Redis' clock
-- PREFIX:ended:ID         string  how many an acknowledged lease had; expires
-- PREFIX:landed:GATEWAY   zset    finishes that landed ("NUMBER SESSION", by the gateway's outbox) and may be sent again
--                                 -> infinity, or when the gateway confirmed that it will not send them again, in
--                                 milliseconds of this Redis' clock
-- PREFIX:closed           hash    group -> members
-- PREFIX:closed_order     zset    group -> the revision at which it was closed
-- PREFIX:damaged          set     SEQs whose body does not decode
-- PREFIX:events           stream  one event for each revision, the last 65,536 or so
--
-- Invariants: an entry is free (`lease` is empty) or in one live lease; every change has an event, and the events up to
-- a revision make what is known of the entries at it; each operation may run twice with the same result.

local P = KEYS[1]
local CALLER = ARGV[2]
local EVENTS_MAX = 65536
local LAPSES_MAX = 64
local ENDED_S = 3600
-- A finish whose connection broke may still arrive, as long as a kernel repeats its packets: about 15 minutes.
local CONFIRMED_MS = 1800000

local function key(name, id)
    return id and (P .. ':' .. name .. ':' .. id) or (P .. ':' .. name)
end

local function total(name)
    return tonumber(redis.call('HGET', key('totals'), name) or '0') or 0
end

local function count(name, by)
    return redis.call('HINCRBY', key('totals'), name, by)
end

local function emit(...)
    local revision = count('revision', 1)
    redis.call('XADD', key('events'), 'MAXLEN', '~', EVENTS_MAX, revision .. '-0', 'by', CALLER, ...)
    return revision
end

local function words(text)
    local found = {}
    for word in string.gmatch(text, '%S+') do found[#found + 1] = word end
    return found
end

-- An entry that is not there has neither field.
local function entry(seq, ...)
    return redis.call('HMGET', key('entry', seq), ...)
end

local function forget(seq)
    local session, bytes = unpack(entry(seq, 'session', 'bytes'))
    redis.call('HDEL', key('sessions'), session)
    count('entries', -1)
    count('bytes', -tonumber(bytes))
end

local function remove(seq)
    forget(seq)
    redis.call('DEL', key('entry', seq))
end

-- Ends a lease. With `used`, each of its entries has had one more use, and is removed unless its reader allows another.
local function end_lease(id, why, used)
    local seqs, uses_max = unpack(redis.call('HMGET', key('lease', id), 'seqs', 'uses_max'))
    local free, gone = {}, {}
    for _, seq in ipairs(words(seqs)) do
        local uses = tonumber(entry(seq, 'uses')[1])
        if uses then
            if used then uses = uses + 1 end
            count('leased', -1)
            if used and uses >= tonumber(uses_max) then
                remove(seq)
                gone[#gone + 1] = seq
            else
                redis.call('HSET', key('entry', seq), 'lease', '', 'uses', uses)
                free[#free + 1] = seq .. ':' .. uses
            end
        end
    end
    redis.call('DEL', key('lease', id))
    redis.call('ZREM', key('leases'), id)
    emit('kind', 'ended', 'lease', id, 'why', why, 'free', table.concat(free, ' '), 'gone', table.concat(gone, ' '))
    return #free + #gone
end

local function now_ms()
    local now = redis.call('TIME')
    return tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
end

local function lapse()
    local over = redis.call('ZRANGEBYSCORE', key('leases'), '-inf', now_ms(), 'LIMIT', 0, LAPSES_MAX)
    for _, id in ipairs(over) do end_lease(id, 'lapsed', false) end
end

local operations = {}

-- One finish: body, index and groups' bookkeeping. `gone`: what the caller chose to make room.
function operations.add(finish, session, group, oldest, facts, body, capacity, bytes_max, gone)
    if redis.call('ZSCORE', key('landed', CALLER), finish) then return {'known'} end
    if redis.call('HEXISTS', key('sessions'), session) == 1 then return {'taken'} end
    gone = words(gone)
    local gone_bytes = 0
    for _, seq in ipairs(gone) do
        local lease, bytes = unpack(entry(seq, 'lease', 'bytes'))
        if lease ~= '' then return {'raced'} end
        gone_bytes = gone_bytes + tonumber(bytes)
    end
    local entries, bytes = total('entries') - #gone, total('bytes') - gone_bytes + #body
    -- As in the buffer's own bookkeeping: bytes may exceed their bound where nothing is left that could be evicted.
    if entries >= tonumber(capacity) or (bytes > tonumber(bytes_max) and entries > total('leased')) then
        return {'full'}
    end
    if entries > 0 and entries == total('leased') and bytes - #body >= tonumber(bytes_max) then return {'full'} end
    for _, seq in ipairs(gone) do remove(seq) end
    if #gone > 0 then emit('kind', 'gone', 'seqs', table.concat(gone, ' ')) end
    local seq = count('seq', 1)
    redis.call('HSET', key('entry', seq), 'session', session, 'group', group, 'oldest', oldest, 'facts', facts,
        'uses', 0, 'lease', '', 'gateway', CALLER, 'bytes', #body, 'edits', 0, 'body', body)
    redis.call('HSET', key('sessions'), session, seq)
    redis.call('ZADD', key('landed', CALLER), '+inf', finish)
    redis.call('PERSIST', key('landed', CALLER))
    count('entries', 1)
    count('bytes', #body)
    emit('kind', 'put', 'seq', seq, 'session', session, 'group', group, 'oldest', oldest, 'facts', facts, 'uses', 0)
    return {'ok', seq}
end

-- A gateway that never comes back leaves nothing, unless it may still send what landed.
local function expire_landed()
    if redis.call('ZCOUNT', key('landed', CALLER), '+inf', '+inf') == 0 then
        redis.call('PEXPIRE', key('landed', CALLER), CONFIRMED_MS)
    end
end

-- The gateway will not send these finishes again.
function operations.confirm(finishes)
    local now = now_ms()
    for _, finish in ipairs(cjson.decode(finishes)) do redis.call('ZADD', key('landed', CALLER), 'XX', now, finish) end
    redis.call('ZREMRANGEBYSCORE', key('landed', CALLER), '-inf', now - CONFIRMED_MS)
    expire_landed()
    return {'ok'}
end

-- The same for all finishes of an earlier life of the gateway, but those that it still sends.
function operations.confirm_others(finishes)
    local kept, now = {}, now_ms()
    for _, finish in ipairs(cjson.decode(finishes)) do kept[finish] = true end
    for _, finish in ipairs(redis.call('ZRANGEBYSCORE', key('landed', CALLER), '+inf', '+inf')) do
        if not kept[finish] then redis.call('ZADD', key('landed', CALLER), now, finish) end
    end
    expire_landed()
    return {'ok'}
end

-- A lease of the entries, if each is free and was used as often as the caller believes. With their bodies.
function operations.lease(id, reader, lease_ms, uses_max, chosen)
    local seqs, uses = {}, {}
    for seq, used in string.gmatch(chosen, '(%d+):(%d+)') do
        seqs[#seqs + 1] = seq
        uses[#uses + 1] = used
    end
    local named = table.concat(seqs, ' ')
    local before, by = unpack(redis.call('HMGET', key('lease', id), 'seqs', 'gateway'))
    if before and (before ~= named or by ~= CALLER) then return {'raced'} end
    if not before then
        for i, seq in ipairs(seqs) do
            local lease, used = unpack(entry(seq, 'lease', 'uses'))
            if lease ~= '' or used ~= uses[i] then return {'raced'} end
        end
        for _, seq in ipairs(seqs) do redis.call('HSET', key('entry', seq), 'lease', id) end
        redis.call('HSET', key('lease', id), 'reader', reader, 'uses_max', uses_max, 'seqs', named,
            'gateway', CALLER)
        redis.call('ZADD', key('leases'), now_ms() + tonumber(lease_ms), id)
        count('leased', #seqs)
        emit('kind', 'leased', 'lease', id, 'reader', reader, 'uses_max', uses_max, 'seqs', named)
    end
    local found = {'ok'}
    for _, seq in ipairs(seqs) do found[#found + 1] = entry(seq, 'body')[1] or '' end
    return found
end

function operations.acknowledge(id)
    if redis.call('EXISTS', key('lease', id)) == 1 then
        redis.call('SET', key('ended', id), end_lease(id, 'acknowledged', true), 'EX', ENDED_S)
    end
    local found = redis.call('GET', key('ended', id))
    return found and {'ok', found} or {'unknown'}
end

function operations.release(id)
    if redis.call('EXISTS', key('lease', id)) == 0 then return {'unknown'} end
    return {'ok', end_lease(id, 'released', false)}
end

-- Those of the entries that are free; returns the others that are there.
function operations.delete(seqs)
    local gone, left = {}, {}
    for _, seq in ipairs(words(seqs)) do
        local lease = entry(seq, 'lease')[1]
        if lease == '' then
            remove(seq)
            gone[#gone + 1] = seq
        elseif lease then
            left[#left + 1] = seq
        end
    end
    if #gone > 0 then emit('kind', 'gone', 'seqs', table.concat(gone, ' ')) end
    return left
end

function operations.read(seq)
    return entry(seq, 'body', 'edits', 'lease')
end

-- Replaces a free entry's body, if nobody has since `edits`.
function operations.revise(seq, edits, facts, body)
    local lease, found, bytes = unpack(entry(seq, 'lease', 'edits', 'bytes'))
    if lease ~= '' or found ~= edits then return {'raced'} end
    redis.call('HSET', key('entry', seq), 'facts', facts, 'body', body, 'bytes', #body, 'edits', tonumber(edits) + 1)
    count('bytes', #body - tonumber(bytes))
    emit('kind', 'facts', 'seq', seq, 'facts', facts)
    return {'ok'}
end

-- The entry stays as it is, for whoever can read it, and belongs to no lease.
function operations.leave_out(seq)
    local lease = entry(seq, 'lease')[1]
    if not lease or redis.call('SISMEMBER', key('damaged'), seq) == 1 then return {'ok'} end
    if lease ~= '' then
        count('leased', -1)
        local left = {}
        for _, other in ipairs(words(redis.call('HGET', key('lease', lease), 'seqs') or '')) do
            if other ~= seq then left[#left + 1] = other end
        end
        if redis.call('EXISTS', key('lease', lease)) == 1 then
            redis.call('HSET', key('lease', lease), 'seqs', table.concat(left, ' '))
        end
    end
    forget(seq)
    redis.call('SADD', key('damaged'), seq)
    emit('kind', 'gone', 'seqs', seq)
    return {'ok'}
end

function operations.close_group(group, members, closed_max)
    if redis.call('HGET', key('closed'), group) == members then return {'ok'} end
    redis.call('HSET', key('closed'), group, members)
    redis.call('ZADD', key('closed_order'), emit('kind', 'closed', 'group', group, 'members', members), group)
    while redis.call('ZCARD', key('closed_order')) > tonumber(closed_max) do
        local oldest = redis.call('ZRANGE', key('closed_order'), 0, 0)[1]
        redis.call('ZREM', key('closed_order'), oldest)
        redis.call('HDEL', key('closed'), oldest)
        emit('kind', 'opened', 'group', oldest)
    end
    return {'ok'}
end

-- The newest revision, and up to `limit` events above `after`; {revision, false} when they are not there any more.
function operations.follow(after, limit)
    local newest = total('revision')
    after = tonumber(after)
    if newest < after then return {newest, false} end
    if newest == after then return {newest, {}} end
    local found = redis.call('XRANGE', key('events'), (after + 1) .. '-0', '+', 'COUNT', limit)
    if #found == 0 or found[1][1] ~= (after + 1) .. '-0' then return {newest, false} end
    return {newest, found}
end

-- The entries of one page, without their bodies: {revision, next cursor, entries}. An entry that is there throughout is
-- in some page; the events above the first page's revision correct what changed between the pages.
function operations.page(cursor, size)
    local found = redis.call('HSCAN', key('sessions'), cursor, 'COUNT', size)
    local entries = {}
    for i = 2, #found[2], 2 do
        local seq = found[2][i]
        entries[#entries + 1] = {seq, unpack(entry(seq, 'session', 'group', 'oldest', 'facts', 'uses', 'lease'))}
    end
    return {total('revision'), found[1], entries}
end

-- The leases, and the closed groups with their members: {revision, leases, closed}.
function operations.leases()
    local leases = {}
    for _, id in ipairs(redis.call('ZRANGE', key('leases'), 0, -1)) do
        leases[#leases + 1] = {id, unpack(redis.call('HMGET', key('lease', id), 'reader', 'uses_max'))}
    end
    return {total('revision'), leases, redis.call('HGETALL', key('closed'))}
end

lapse()
return operations[ARGV[1]](unpack(ARGV, 3))
