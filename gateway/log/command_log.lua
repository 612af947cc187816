-- One order of commands, the bodies that they name, and the newest snapshot of what they made.
--
-- KEYS[1]: the prefix. ARGV: the operation, and its own arguments.
--
-- PREFIX:log        stream  life, number, at, command: one entry for each command; its id has the time
-- PREFIX:state      hash    last: the id of the newest command; since: commands since the snapshot; snapshot: the id up
--                           to which it goes; body, parts: its own; trimmed: the log begins with this one
-- PREFIX:body:NAME  hash    0, 1, ... -> a part
-- PREFIX:sent:LIFE  string  the number of the newest batch of one gateway's life; expires

local P = KEYS[1]
local LOG, STATE = P .. ':log', P .. ':state'
-- A batch whose connection broke may still arrive, as long as a kernel repeats its packets: about 15 minutes.
local SENT_S = 86400
local COUNT = 512

local function field(name, default) return redis.call('HGET', STATE, name) or default end

local function at(id)
    local entry = redis.call('XRANGE', LOG, id, id)[1]
    return entry and table.concat({entry[2][2], entry[2][4], entry[2][6]}, '-') or ''
end

local operations = {}

-- The last words: `needs` of them the names of bodies, each with its number of parts, and then the commands.
function operations.exchange(id, mark, most, life, number, needs, ...)
    local proven, words, sent = at(id) == mark, {...}, P .. ':sent:' .. life
    needs = tonumber(needs)
    if id == '0-0' then proven = field('trimmed', id) == id end
    if proven and #words > 0 then
        local newest = tonumber(redis.call('GET', sent) or '0')
        local new = tonumber(number) > newest
        for i = 1, new and needs or 0, 2 do
            if redis.call('HLEN', P .. ':body:' .. words[i]) ~= tonumber(words[i + 1]) then return {words[i]} end
        end
        for i = needs + 1, new and #words or 0 do
            local where = i - needs - 1
            local id = redis.call('XADD', LOG, '*', 'life', life, 'number', number, 'at', where, 'command', words[i])
            redis.call('HSET', STATE, 'last', id)
        end
        if new then redis.call('HINCRBY', STATE, 'since', #words - needs) end
        -- Also a batch that is there already writes, so that WAIT behind it waits for the batch.
        redis.call('SET', sent, new and number or newest, 'EX', SENT_S)
    end
    local found, bytes = {}, 0
    for _, entry in ipairs(proven and redis.call('XRANGE', LOG, '(' .. id, '+', 'COUNT', COUNT) or {}) do
        bytes = bytes + #entry[2][8]
        if #found > 0 and bytes > tonumber(most) then break end
        found[#found + 1] = entry
    end
    return {proven and 1 or 0, field('last', '0-0'), tonumber(field('since', '0')), redis.call('TIME'), found}
end

function operations.keep(id, mark, body, parts)
    local before = field('snapshot', '0-0')
    local newer = redis.call('XRANGE', LOG, '(' .. before, id, 'COUNT', 1)
    if at(id) ~= mark or #newer == 0 then return body end
    local old = field('body', '')
    redis.call('HSET', STATE, 'snapshot', id, 'body', body, 'parts', parts, 'trimmed', before,
        'since', #redis.call('XRANGE', LOG, '(' .. id, '+'))
    redis.call('XTRIM', LOG, 'MINID', before)
    return old
end

function operations.snapshot()
    local id = field('snapshot', '0-0')
    return {id, at(id), field('body', ''), tonumber(field('parts', '0')), field('trimmed', '0-0')}
end

return operations[ARGV[1]](unpack(ARGV, 2))
