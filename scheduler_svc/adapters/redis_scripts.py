"""The Lua scripts of the scheduler.

Every script that reads or writes the queue compares the epoch first, so that a deposed leader can
do nothing, however late its command arrives. Such a script answers {0, stored epoch} when it
refuses and {1, ...} when it has done its work. KEYS[1] is the epoch, ARGV[1] the caller's.
"""

_FENCE = """
local stored = redis.call('GET', KEYS[1])
if stored ~= ARGV[1] then return {0, stored or ''} end
"""

# KEYS: epoch, requests. ARGV: epoch, group, consumer, count, id (`>` for new entries).
READ = (
    _FENCE
    + """
local now = redis.call('TIME')
local reply = redis.call(
  'XREADGROUP', 'GROUP', ARGV[2], ARGV[3], 'COUNT', ARGV[4], 'STREAMS', KEYS[2], ARGV[5])
local entries = {}
if reply and reply[1] then entries = reply[1][2] end
return {1, now[1], now[2], entries}
"""
)

# KEYS: epoch, requests, notice streams. ARGV: epoch, group, cap and TTL (ms) of notice streams,
# number of entries, entries, then pairs (index into KEYS, notice). Notices go first: they are what
# Redis can refuse, and then nothing has been acknowledged.
FINISH = (
    _FENCE
    + """
local count = tonumber(ARGV[5])
local at = 6 + count
while at < #ARGV do
  local key = KEYS[tonumber(ARGV[at])]
  redis.call('XADD', key, 'MAXLEN', '~', ARGV[3], '*', 'notice', ARGV[at + 1])
  redis.call('PEXPIRE', key, ARGV[4])
  at = at + 2
end
redis.call('XACK', KEYS[2], ARGV[2], unpack(ARGV, 6, 5 + count))
redis.call('XDEL', KEYS[2], unpack(ARGV, 6, 5 + count))
return {1}
"""
)

# KEYS: epoch, backlog. ARGV: epoch, requests, tokens, tokens per second, TTL in ms.
BACKLOG = (
    _FENCE
    + """
redis.call('HSET', KEYS[2], 'requests', ARGV[2], 'tokens', ARGV[3], 'tokens_per_s', ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return {1}
"""
)

# KEYS: lease, epoch. ARGV: holder, TTL in ms. Answers the new epoch, or nothing if it is held.
ACQUIRE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return false end
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
local stored = tonumber(redis.call('GET', KEYS[2]) or '0')
local epoch = string.format('%.0f', math.max(stored + 1, ms))
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[2], epoch)
return epoch
"""

# KEYS: lease, epoch. ARGV: holder, TTL in ms, epoch. A free lease is taken back if nobody has led
# since; a lost or older stored epoch (Redis came back without its last writes) is put right.
RENEW = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
local stored = tonumber(redis.call('GET', KEYS[2]) or '0')
if stored > tonumber(ARGV[3]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if stored < tonumber(ARGV[3]) then redis.call('SET', KEYS[2], ARGV[3]) end
return 1
"""

# KEYS: lease, epoch. ARGV: holder, own epoch, epoch that a worker knows. Gives the lease back with
# an epoch stored that the next leader will exceed.
STEP_OVER = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
local stored = tonumber(redis.call('GET', KEYS[2]) or '0')
if stored > tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[2], ARGV[3])
redis.call('DEL', KEYS[1])
return 1
"""

# KEYS: lease. ARGV: holder.
RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""
