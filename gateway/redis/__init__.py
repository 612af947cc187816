"""The Redis that gateways share: its address, the checks of its durability, and scripts that are run until they landed.

The stores that keep something there (`gateway.experience`) come in by `RedisServer`. The package `redis` is imported
only when a gateway connects: it is an optional extra.
"""

from gateway.redis.address import RedisAddress, is_redis
from gateway.redis.server import RedisServer, Script

__all__ = ["RedisAddress", "RedisServer", "Script", "is_redis"]
