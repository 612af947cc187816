-- The gateways of one namespace: where each is reached, which engines are whose, and which names of sessions.
--
-- KEYS[1]: the prefix. ARGV: the operation, this gateway's name, the name of its life, and the operation's own arguments.
--
-- PREFIX:at            hash        a gateway's name -> where it is reached
-- PREFIX:seen          sorted set  a gateway's name, by its last look, in seconds
-- PREFIX:engine:KEY    string      the gateway that has the engine, and its life (GATEWAY/LIFE); expires
-- PREFIX:session:NAME  string      the same for a session whose client named it, or a group (group/NAME); expires
--
-- Invariants: a claim of another gateway is never replaced: it expires, or its gateway drops it. A life drops only its own:
-- a gateway that started again meanwhile has taken it over.

local P, GATEWAY = KEYS[1], ARGV[2]
local MINE = GATEWAY .. '/' .. ARGV[3]
local FORGET_S = 604800

local operations = {}

local function holder(kind, name)
    local found = redis.call('GET', P .. ':' .. kind .. ':' .. name)
    return found and string.match(found, '^[^/]*')
end

-- A session's name is the gateway's, whichever its life; an engine is that life's.
local function claim(kind, name, ttl_ms)
    local key = P .. ':' .. kind .. ':' .. name
    local found = redis.call('GET', key)
    if found and found ~= MINE and (kind == 'engine' or holder(kind, name) ~= GATEWAY) then return found end
    redis.call('SET', key, MINE, 'PX', ttl_ms)
    return false
end

-- Where all gateways are, after this one has shown itself. Without `where`, it is not reached yet.
function operations.show(where)
    local now = tonumber(redis.call('TIME')[1])
    if where ~= '' then redis.call('HSET', P .. ':at', GATEWAY, where) end
    redis.call('ZADD', P .. ':seen', now, GATEWAY)
    for _, gone in ipairs(redis.call('ZRANGEBYSCORE', P .. ':seen', '-inf', now - FORGET_S)) do
        redis.call('HDEL', P .. ':at', gone)
        redis.call('ZREM', P .. ':seen', gone)
    end
    return redis.call('HGETALL', P .. ':at')
end

-- The holder of each name, or an empty string where it is this gateway's now.
function operations.claim(kind, ttl_ms, ...)
    local holders = {}
    for number, name in ipairs({...}) do holders[number] = claim(kind, name, ttl_ms) or '' end
    return holders
end

-- What one life of a gateway holds.
function operations.drop(kind, life, ...)
    for _, name in ipairs({...}) do
        local key = P .. ':' .. kind .. ':' .. name
        if redis.call('GET', key) == GATEWAY .. '/' .. life then redis.call('DEL', key) end
    end
    return 'OK'
end

function operations.holder(kind, name)
    return holder(kind, name) or ''
end

return operations[ARGV[1]](unpack(ARGV, 4))
