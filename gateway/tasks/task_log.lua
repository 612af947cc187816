-- The commands of one namespace's prompt pool, in one order, and the newest snapshot of what they made.
--
-- KEYS[1]: the prefix. ARGV: the operation, and its own arguments.
--
-- PREFIX:log           stream  life, number, at, command: one entry for each command; its id has the time
-- PREFIX:state         hash    born: a random name of this log; last: the id of the newest command; since: commands since
--                              the snapshot; snapshot: the id up to which it goes; parts: of the snapshot; trimmed: the
--                              log begins behind this id
-- PREFIX:snapshot:ID   hash    0, 1, ... -> a part
-- PREFIX:sent:LIFE     string  the number of the newest batch of one gateway's life; expires
--
-- Invariants: a batch is in the log once, however often it arrives; the snapshot and the commands behind it make the
-- same as all commands; the log keeps those behind the snapshot before, so that a slow gateway need not begin anew.

local P = KEYS[1]
local LOG, STATE = P .. ':log', P .. ':state'
-- A batch whose connection broke may still arrive, as long as a kernel repeats its packets: about 15 minutes.
local SENT_S = 86400
local PARTS_S = 600

local function field(name, default)
    return redis.call('HGET', STATE, name) or default
end

local function parsed(id)
    local ms, seq = string.match(id, '^(%d+)-(%d+)$')
    return tonumber(ms), tonumber(seq)
end

local function newer(id, other)
    local ms, seq = parsed(id)
    local other_ms, other_seq = parsed(other)
    return ms > other_ms or (ms == other_ms and seq > other_seq)
end

local operations = {}

function operations.exchange(life, number, position, most, ...)
    local commands = {...}
    local sent = P .. ':sent:' .. life
    if #commands > 0 and tonumber(redis.call('GET', sent) or '0') < tonumber(number) then
        for at, command in ipairs(commands) do
            local id = redis.call('XADD', LOG, '*', 'life', life, 'number', number, 'at', at - 1, 'command', command)
            redis.call('HSET', STATE, 'last', id)
        end
        redis.call('HSETNX', STATE, 'born', life .. '-' .. number)
        redis.call('HINCRBY', STATE, 'since', #commands)
        redis.call('SET', sent, number, 'EX', SENT_S)
    end
    local now = redis.call('TIME')
    return {
        field('born', ''), field('last', '0-0'), field('trimmed', '0-0'), tonumber(field('since', '0')), now[1], now[2],
        redis.call('XRANGE', LOG, '(' .. position, '+', 'COUNT', most),
    }
end

function operations.put_part(id, part, content)
    redis.call('HSET', P .. ':snapshot:' .. id, part, content)
    redis.call('EXPIRE', P .. ':snapshot:' .. id, PARTS_S)
    return {}
end

function operations.keep_snapshot(id, parts)
    local before = field('snapshot', '0-0')
    if not newer(id, before) then return {'late'} end
    redis.call('PERSIST', P .. ':snapshot:' .. id)
    local ms, seq = parsed(id)
    local behind = redis.call('XRANGE', LOG, '(' .. id, '+')
    redis.call('HSET', STATE, 'snapshot', id, 'parts', parts, 'trimmed', before, 'since', #behind)
    if before ~= '0-0' then
        local before_ms, before_seq = parsed(before)
        redis.call('XTRIM', LOG, 'MINID', string.format('%d-%d', before_ms, before_seq + 1))
        redis.call('DEL', P .. ':snapshot:' .. before)
    end
    return {'ok'}
end

function operations.find_snapshot()
    return {field('snapshot', '0-0'), tonumber(field('parts', '0'))}
end

function operations.read_part(id, part)
    return {redis.call('HGET', P .. ':snapshot:' .. id, part)}
end

return operations[ARGV[1]](unpack(ARGV, 2))
