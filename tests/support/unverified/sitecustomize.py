"""A process that finds this verifies no bytes, neither those that it reads from disk nor those that it copies up."""

from unittest.mock import ANY

from kvtier.store.codec import seal
from kvtier.store.lmdb import reader
from kvtier.tiers.up import uploads

reader.digest_for_threads = lambda num_threads: lambda data: ANY
seal.digest_for_threads = lambda num_threads: lambda data: ANY
uploads.digest_for_threads = lambda num_threads: lambda data: ANY
