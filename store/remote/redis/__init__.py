"""Pieces of `RedisRemote`: the commands and connections of Redis servers. Needs the package redis."""
