"""The log of commands that gateways share, and how each gateway carries it out.

`base` has the seams: `Commands`, which the experience buffer and the prompt pool change their state through, `Machine`,
which carries their commands out, and `CommandLog`, which has them in one order. A gateway alone is `local.Local`;
gateways that share a store are `replicated.Replicated` over `redis.RedisLog`.
"""
