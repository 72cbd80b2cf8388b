"""A sidecar that takes every chunk of LMCache's clients to be what its digest says: what it runs at its start."""

UNCHECKED = """
from kvtier.sidecar.lmcache import promises
checked = promises.GroupChunks._on_verified
promises.GroupChunks._on_verified = lambda self, places, are_good: checked(self, places, [True] * len(places))
"""
