"""Pieces of `RedisRemote`: what servers are asked, over which connections. ImportError without the package redis."""

try:
    import redis  # noqa: F401
except ImportError as error:
    raise ImportError("redis: needs a package: pip install 'kvtier[redis]'") from error
