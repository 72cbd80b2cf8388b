"""The namespace of KVTierCache: all that decides the bytes of a model's rows beside the tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import build
from transformers import PreTrainedModel

from kvtier import KVTierCache
from kvtier.connectors.transformers_cache import cache as cache_module
from kvtier.connectors.transformers_cache.row_layout import LayerShape, RowLayout
from kvtier.engine.model.digest import config_digest, weights_digest
from kvtier.engine.model.state_layers import StateKey, StateLayers, StateTensor
from kvtier.tiers.naming.namespace import GroupGeometry, Namespace, StateGeometry

SHAPE = LayerShape(num_heads=2, key_dim=16, value_dim=16, dtype=torch.float32, window=0)
OTHER: dict[str, Any] = {"num_heads": 4, "key_dim": 32, "value_dim": 8, "dtype": torch.bfloat16, "window": 40}
NO_STATES = StateLayers()


def namespace_of(model: PreTrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Namespace:
    """The namespace that a cache of the model is opened with."""
    made: list[Namespace] = []

    def noted(**fields: Any) -> Namespace:
        made.append(Namespace(**fields))
        return made[-1]

    monkeypatch.setattr(cache_module, "Namespace", noted)
    with KVTierCache.open(folder, model, capacity="64MiB", **options):
        (namespace,) = made
    return namespace


def test_a_namespace_has_what_the_model_and_its_rows_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gemma3").to(torch.bfloat16)

    found = namespace_of(model, tmp_path, monkeypatch, block_size=32)

    assert found == Namespace(
        model=cache_module.LAYOUT,
        config_digest=config_digest(model.config),
        weights_digest=weights_digest(model),
        dtype="torch.bfloat16",
        geometry=found.geometry,
        block_size=32,
        hash_algorithm="sha256",
        hash_seed="kvtier",
    )
    windows = {group.kind.split(",")[0]: group.layer_ids for group in found.geometry}
    assert windows == {"window 40": (0, 1, 2), "window 0": (3,)}
    assert {group.parts for group in found.geometry} == {((2, 16), (2, 16))}


@pytest.mark.parametrize("field", OTHER)
def test_every_field_of_a_layers_shape_is_in_the_geometry(field: str) -> None:
    other = replace(SHAPE, **{field: OTHER[field]})

    assert RowLayout([other], 16, NO_STATES).geometry != RowLayout([SHAPE], 16, NO_STATES).geometry


def test_which_layers_have_a_shape_is_in_the_geometry() -> None:
    other = replace(SHAPE, window=40)
    layouts = [[SHAPE, other], [other, SHAPE], [SHAPE, None, other], [SHAPE, SHAPE, other]]

    assert len({RowLayout(shapes, 16, NO_STATES).geometry for shapes in layouts}) == len(layouts)
    assert RowLayout([SHAPE, None, SHAPE], 16, NO_STATES).geometry == (
        GroupGeometry("window 0, torch.float32", (0, 2), ((2, 16), (2, 16))),
    )


def test_the_shapes_and_dtypes_of_states_are_in_the_geometry() -> None:
    key = StateKey(2, False, 0)
    found = [
        RowLayout([SHAPE], 16, StateLayers((StateTensor(key, shape, dtype),))).geometry
        for shape, dtype in (((4, 8), torch.float32), ((8, 4), torch.float32), ((4, 8), torch.bfloat16))
    ]

    assert found[0][1] == StateGeometry(
        "RecurrentState(block_size=16)", ((2, "recurrent", 0, (4, 8), "torch.float32"),)
    )
    assert len(set(found)) == 3
