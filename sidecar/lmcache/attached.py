"""The clients that are attached with LMCache's protocol, and their leases."""

from collections.abc import Iterable, Iterator

from kvtier.sidecar.endpoint import AttachedClient, Lease, LeaseUse
from kvtier.sidecar.lmcache.promises import Promise
from kvtier.sidecar.lmcache.registrations import Instance
from kvtier.sidecar.lmcache.stores import Store
from kvtier.sidecar.port import Client


def attached(
    clients: Iterable[Client[list[bytes]]],
    instances: Iterable[Instance],
    promises: Iterable[Promise],
    stores: Iterable[Store],
) -> Iterator[AttachedClient]:
    """Yield all registered workers, and all connections that have no worker (such as a scheduler's).

    Each comes with its leases. A connection has leased the chunks of the hits that were reported to it. A worker has
    the leases of its connection, and the slots that it is copying from or to now.
    """
    workers, all_promises, all_stores = list(instances), list(promises), list(stores)
    for client in clients:
        own = [instance for instance in workers if instance.client is client]
        promised = tuple(_promised(promise) for promise in all_promises if promise.client is client)
        if not own:
            yield AttachedClient(f"connection {client.connection.fileno()}", client.since, None, sum(promised, ()))
        for instance in own:
            leases = (*sum(promised, ()), *copied(instance, all_promises, all_stores))
            yield AttachedClient(worker_name(instance), client.since, instance.layout, leases)


def copied(instance: Instance, promises: Iterable[Promise], stores: Iterable[Store]) -> tuple[Lease, ...]:
    """Return the leases on the slots that the worker is copying from or to now."""
    return (*_read(instance, promises), *_written(instance, stores))


def worker_name(instance: Instance) -> str:
    """Return the worker's name for display."""
    return f"worker {instance.instance_id:x}"


def _promised(promise: Promise) -> tuple[Lease, ...]:
    if promise.is_ended:
        return ()
    return tuple(
        Lease(LeaseUse.PROMISED, own.group_id, own.num_arrived - own.first, promise.begun_at) for own in promise.chunks
    )


def _read(instance: Instance, promises: Iterable[Promise]) -> Iterator[Lease]:
    for promise in promises:
        for own in promise.chunks:
            for reading in own.readings:
                if reading.instance is instance:
                    yield Lease(LeaseUse.READ, own.group_id, len(reading.chunks), reading.begun_at)


def _written(instance: Instance, stores: Iterable[Store]) -> Iterator[Lease]:
    for store in stores:
        if store.instance is instance:
            yield Lease(LeaseUse.WRITTEN, store.group_id, len(store.slots), store.begun_at)
