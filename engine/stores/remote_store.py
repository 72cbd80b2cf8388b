"""The remote tier of an engine, built from its configuration: store, codec, cipher and the threads that use them."""

import logging
import time
from dataclasses import replace
from pathlib import Path

from kvtier.engine.config import RemoteConfig
from kvtier.engine.stores.disk_store import cipher_of, codec_of, codec_of_others
from kvtier.extras import extra
from kvtier.store.codec.cipher import Cipher
from kvtier.store.private_file import read_private
from kvtier.store.remote.redis_settings import RedisSettings, RedisTls
from kvtier.store.remote.sealed_remote import SealedRemote
from kvtier.store.remote_store import RemoteStore
from kvtier.tiers.lower.remote.remote_tier import RemoteTier
from kvtier.tiers.naming.namespace import Namespace
from kvtier.transfer.lane import Finished, Lane, ThreadLane
from kvtier.transfer.transfer_engine import Route

log = logging.getLogger(__name__)
NUM_GETTERS = 4  # concurrent reads
NUM_PUTTERS = 1
NUM_ASKERS = 2


def open_remote(config: RemoteConfig, finished: Finished, dtype: str | None = None) -> "OpenRemote":
    """Return the configured remote store.

    Args:
        config: Address, credentials, codec and encryption key of the store.
        finished: Receives the results of queries and copies.
        dtype: Data type of the blocks' elements; None for blocks of other engines, whose data type is not known.

    Raises:
        ValueError: If a URL, a password or a key cannot be used.
        MissingExtra: If the package for the store is not installed.
    """
    codec = codec_of_others(config) if dtype is None else codec_of(config, dtype)
    cipher = cipher_of(config)
    store = remote_store(config)
    return OpenRemote(store, SealedRemote(store, codec, cipher), cipher, finished)


def remote_stays(where: str) -> str:
    """Return a note for the operator: a reset does not delete the blocks in the remote store at *where*."""
    return (
        f"remote: blocks in {where} stay and are found again, because other machines share them; "
        f"'kvtier forget-remote {where} --namespace HEX' deletes them, and the server's log names the namespace"
    )


def remote_store(config: RemoteConfig) -> RemoteStore:
    """Return the client of the store at the configured URL. Raises the errors of `open_remote`."""
    if config.is_redis:
        with extra("redis", f"remote {config.url.partition('://')[0]}://"):
            from kvtier.store.remote.redis_remote import RedisRemote

        tls = None if config.ca_file is None else RedisTls(ca_file=config.ca_file)
        settings = RedisSettings.from_url(config.url, _password(config), tls)
        timeout_s = config.timeout_s or settings.timeout_s
        return RedisRemote(replace(settings, timeout_s=timeout_s, ttl_s=config.ttl_s or None))
    return _object_store(config)


def _object_store(config: RemoteConfig) -> RemoteStore:
    from kvtier.store.remote.object_remote import ObjectRemote
    from kvtier.store.remote.object_settings import ObjectSettings

    plain = ObjectSettings(config.url)
    return ObjectRemote(
        replace(
            plain,
            endpoint=config.endpoint or "",
            region=config.region or "",
            allow_http=(config.endpoint or "").startswith("http://"),
            timeout_s=config.timeout_s or plain.timeout_s,
        )
    )


def _password(config: RemoteConfig) -> str | None:
    if config.password_file is None:
        return None
    path = Path(config.password_file).expanduser()
    try:
        file = read_private(path)
        password = file.content.decode().strip()
    except OSError as error:
        raise ValueError(f"remote: cannot read the password in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"remote: the password in {path} is not UTF-8 text; save it as UTF-8") from None
    if file.exposure is not None:
        raise ValueError(f"remote: the password in {path}: {file.exposure}")
    return password


class OpenRemote:
    """A remote store and the threads that query it. Threads that copy blocks are created by `lanes`.

    The store is connected on first use, so an address that does not answer raises no error here.
    """

    def __init__(self, store: RemoteStore, records: SealedRemote, cipher: Cipher | None, finished: Finished) -> None:
        """Take ownership of *store*. The results of queries are delivered through *finished*."""
        self._store = store
        self._records = records
        self._cipher = cipher
        self._finished = finished
        self._asks = ThreadLane(finished, "ask", num_threads=NUM_ASKERS)

    @property
    def where(self) -> str:
        """The store's address, for display."""
        return self._store.where

    def lanes(self) -> dict[Route, Lane]:
        """Return a new lane (a queue with threads) for copies to the store and one for copies from it.

        The caller closes the lanes.
        """
        return {
            Route.HOST_TO_REMOTE: ThreadLane(self._finished, "put", num_threads=NUM_PUTTERS),
            Route.REMOTE_TO_HOST: ThreadLane(self._finished, "get", num_threads=NUM_GETTERS),
        }

    def tier(self, namespace: bytes) -> RemoteTier:
        """Return a remote tier that keeps blocks in this store, in the namespace with this digest."""
        log.info("remote: blocks are put into %s under namespace %s", self._store.where, namespace.hex())
        return RemoteTier(self._records, namespace, self._asks, time.monotonic)

    def tier_of(self, namespace: Namespace) -> RemoteTier:
        """Return a remote tier that keeps the blocks of *namespace* in this store.

        The id of the encryption key becomes part of the namespace, so blocks stored under another key are misses.
        """
        key_id = "" if self._cipher is None else self._cipher.key_id.hex()
        return self.tier(replace(namespace, encryption_key_id=key_id).digest)

    def close(self) -> None:
        """Close the connections and end the threads for queries."""
        self._store.close()
        self._asks.close()
