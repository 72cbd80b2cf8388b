"""Commands and connections of Redis servers, for `RedisRemote`. Needs the package redis."""
