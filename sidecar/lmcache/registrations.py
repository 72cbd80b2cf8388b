"""Registrations: the engine workers that are attached, and their layouts."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvtier.sidecar.layout import LayoutRefused
from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.layouts import Layouts
from kvtier.sidecar.lmcache.chunk_layout import ChunkLayout
from kvtier.sidecar.lmcache.chunk_part import ChunkPart
from kvtier.sidecar.lmcache.hybrid_layout import AnyChunkLayout, HybridLayout
from kvtier.sidecar.lmcache.wire import GroupLayout, Key, Refused, Registration
from kvtier.sidecar.port import Client

MAX_INSTANCES = 1024
MAX_PINGED = 4096  # workers that are not attached, and whose first ping is remembered


@dataclass(eq=False, slots=True)
class Instance:
    """An attached worker process, with the connection at which it registered."""

    instance_id: int
    client: Client[list[bytes]]
    layout: AnyChunkLayout
    tiers: LayoutTiers

    def rank_of(self, key: Key) -> int:
        """Return the rank of the key's chunks. Raise `Refused` if the key does not match the worker's layout."""
        layout = self.layout
        if (key.model_name, key.world_size) != (layout.model, layout.world_size):
            raise Refused("foreign_key", "a worker requests chunks of another model or world size than it registered")
        if key.worker_id is None or key.worker_id >= layout.world_size:
            raise Refused(
                "foreign_key",
                f"a worker requests chunks of rank {key.worker_id}, but its layout has {layout.world_size} ranks",
            )
        return key.worker_id


class Registrations:
    """The attached workers. Owned by the endpoint's thread.

    A worker is attached from its registration until it unregisters, registers another layout, or its connection ends. A
    silent worker stays attached, because an engine without requests sends nothing at all.
    """

    def __init__(
        self,
        layouts: Layouts,
        chunk_tokens: int,
        weights: Callable[[str], str],
    ) -> None:
        """Start without workers. *weights* returns a digest or revision of a model's weights; empty if unknown."""
        self._layouts = layouts
        self._chunk_tokens = chunk_tokens
        self._weights = weights
        self._instances: dict[int, Instance] = {}
        self._pinged: OrderedDict[int, None] = OrderedDict()  # unknown instances to which a ping was answered False

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._instances.values()))

    def add(self, client: Client[list[bytes]], instance_id: int, layout: AnyChunkLayout) -> Instance:
        """Attach a worker that is not attached. Raise `LayoutRefused` if its layout cannot be served."""
        if len(self._instances) >= MAX_INSTANCES:
            raise LayoutRefused(f"{MAX_INSTANCES} workers, the maximum, are attached already; start another sidecar")
        instance = Instance(instance_id, client, layout, self._layouts.open(layout))
        self._instances[instance_id] = instance
        self._pinged.pop(instance_id, None)
        return instance

    def find(self, client: Client[list[bytes]], instance_id: int) -> Instance | None:
        """Return the worker, or None if it is not attached.

        Raises `Refused` for a worker that another client has registered. Otherwise a client could release slots to
        which another client's worker is writing.
        """
        instance = self._instances.get(instance_id)
        if instance is None or not instance.client.is_open:
            return None
        if instance.client is not client:
            raise Refused("foreign_worker", "a client sent a request for a worker that another client has registered")
        return instance

    def is_attached(self, instance: Instance) -> bool:
        """Return whether the worker is still attached."""
        return self._instances.get(instance.instance_id) is instance

    def remove(self, instance_id: int) -> Instance | None:
        """Detach the worker and return it; None if it was not attached."""
        return self._instances.pop(instance_id, None)

    def of_client(self, client: Client[list[bytes]]) -> list[Instance]:
        """Return the workers that registered at this connection."""
        return [instance for instance in self._instances.values() if instance.client is client]

    def answer_ping(self, client: Client[list[bytes]], instance_id: int | None) -> bool:
        """Return the answer to a worker's ping: True, except False for the first ping of a worker that is not attached.

        An answer of False followed by True makes LMCache's client register the worker again.
        """
        if instance_id is None or self.find(client, instance_id) is not None or instance_id in self._pinged:
            return True
        self._pinged[instance_id] = None
        if len(self._pinged) > MAX_PINGED:
            self._pinged.popitem(last=False)
        return False

    def worker_of(self, model_name: str, world_size: int) -> Instance | None:
        """Return any worker of this model with this world size; None if there is none.

        Raises `Refused` if these workers have different layouts, because a lookup does not say which layout it means.
        """
        found = {
            instance.layout: instance
            for instance in self._instances.values()
            if (instance.layout.model, instance.layout.world_size) == (model_name, world_size)
        }
        if len(found) > 1:
            raise Refused(
                "two_layouts",
                f"engines of the model {model_name!r} are attached with different layouts: {_differences(found)}; "
                "give one of them another --served-model-name or its own sidecar; until then neither has hits",
            )
        return next(iter(found.values()), None)

    def layout_of(self, registration: Registration) -> AnyChunkLayout:
        """Return the layout that a worker registers. Raise `LayoutRefused` if it cannot be served."""
        whole = ChunkLayout(
            model=registration.model_name,
            weights=self._weights(registration.model_name),
            dtype=registration.dtype_str,
            num_planes=1 if registration.use_mla else 2,
            num_layers=registration.num_layers,
            width=registration.hidden_dim_size,
            block_size=registration.block_size,
            chunk_tokens=self._chunk_tokens,
            num_physical_slots=registration.num_physical_slots or self._chunk_tokens,
            world_size=registration.world_size,
        )
        parts = tuple(_part_of(group, registration.use_mla, self._chunk_tokens) for group in registration.group_layouts)
        return HybridLayout(whole, parts) if parts else whole


def _part_of(group: GroupLayout, is_single_plane: bool, chunk_tokens: int) -> ChunkPart:
    return ChunkPart(
        dtype=group.dtype_str,
        num_planes=group.kv_size or (1 if is_single_plane else 2),
        num_layers=group.num_layers,
        width=group.hidden_dim_size,
        block_size=group.tokens_per_block,
        num_tokens=group.window_tokens or chunk_tokens,
        window_chunks=group.window_chunks,
        is_recurrent=group.recurrent,
    )


def _differences(layouts: Iterable[AnyChunkLayout]) -> str:
    """Return the fields that differ between the layouts, with their values."""
    every = [layout.details() for layout in layouts]
    names = [
        name
        for name in dict.fromkeys(name for details in every for name in details if name != "chunk_bytes")
        if len({str(details.get(name)) for details in every}) > 1
    ]
    return ", ".join(f"{name} {' and '.join(str(details.get(name)) for details in every)}" for name in names)
