-- The gateways of one namespace: where each is reached, which engines are whose, and which names of sessions.
--
-- KEYS[1]: the prefix. ARGV: the operation, this gateway's name, and the operation's own arguments.
--
-- PREFIX:at            hash        a gateway's name -> where it is reached
-- PREFIX:seen          sorted set  a gateway's name, by its last look, in seconds
-- PREFIX:engine:KEY    string      the gateway that has the engine; expires
-- PREFIX:session:NAME  string      the gateway that has a session whose client named it; expires
--
-- Invariant: a claim of another gateway is never replaced; it expires, or its gateway drops it.

local P, GATEWAY = KEYS[1], ARGV[2]
local FORGET_S = 604800

local operations = {}

local function claim(kind, name, ttl_ms)
    local key = P .. ':' .. kind .. ':' .. name
    local holder = redis.call('GET', key)
    if holder and holder ~= GATEWAY then return holder end
    redis.call('SET', key, GATEWAY, 'PX', ttl_ms)
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

function operations.drop(kind, ...)
    for _, name in ipairs({...}) do
        local key = P .. ':' .. kind .. ':' .. name
        if redis.call('GET', key) == GATEWAY then redis.call('DEL', key) end
    end
    return 'OK'
end

function operations.holder(kind, name)
    return redis.call('GET', P .. ':' .. kind .. ':' .. name) or ''
end

return operations[ARGV[1]](unpack(ARGV, 3))
