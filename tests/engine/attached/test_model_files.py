"""The digest of the files of a model: every file that decides what it computes is in it, by name, and no other."""

from pathlib import Path

import pytest

from kvtier.engine.attached.model_files import weights_digest

WEIGHTS = ["model.safetensors", "model.gguf", "pytorch_model.bin", "consolidated.pt", "consolidated.00.pth"]
BESIDE = [
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quantization_config.json",
    "adapter_config.json",
]


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", [*WEIGHTS, *BESIDE])
def test_every_file_that_decides_what_a_model_computes_is_in_the_digest(tmp_path: Path, name: str) -> None:
    before = weights_digest(written(tmp_path, {"first.safetensors": b"first", name: b"one"}))

    assert weights_digest(written(tmp_path, {name: b"two"})) != before


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", "vocab.txt"])
def test_other_files_are_not_in_the_digest(tmp_path: Path, name: str) -> None:
    before = weights_digest(written(tmp_path, {"model.safetensors": b"first", name: b"one"}))

    assert weights_digest(written(tmp_path, {name: b"two"})) == before


def test_files_in_folders_below_are_in_the_digest(tmp_path: Path) -> None:
    before = weights_digest(written(tmp_path, {"model.safetensors": b"first", "original/params.pth": b"one"}))

    assert weights_digest(written(tmp_path, {"original/params.pth": b"two"})) != before


def test_files_that_have_exchanged_their_contents_are_others(tmp_path: Path) -> None:
    one = written(tmp_path / "one", {"a.safetensors": b"first", "b.safetensors": b"second"})
    other = written(tmp_path / "other", {"a.safetensors": b"second", "b.safetensors": b"first"})

    assert weights_digest(one) != weights_digest(other)


def test_a_file_of_another_name_is_another(tmp_path: Path) -> None:
    one = written(tmp_path / "one", {"a.safetensors": b"first"})
    other = written(tmp_path / "other", {"b.safetensors": b"first"})

    assert weights_digest(one) != weights_digest(other)


def test_the_digest_does_not_depend_on_where_the_folder_is_or_in_which_order_it_was_written(tmp_path: Path) -> None:
    names = [f"model-{number:05}.safetensors" for number in range(40)]
    one = written(tmp_path / "one", {name: name.encode() for name in names})
    other = written(tmp_path / "moved" / "other", {name: name.encode() for name in names[::-1]})

    assert weights_digest(one) == weights_digest(other)


def test_a_model_of_one_file_is_that_file(tmp_path: Path) -> None:
    written(tmp_path, {"model.gguf": b"first", "config.json": b"{}"})
    before = weights_digest(tmp_path / "model.gguf")

    written(tmp_path, {"config.json": b'{"rope_theta": 1}', "other.gguf": b"another"})
    assert weights_digest(tmp_path / "model.gguf") == before
    written(tmp_path, {"model.gguf": b"second"})
    assert weights_digest(tmp_path / "model.gguf") != before


def test_a_folder_with_only_what_stands_beside_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no weights .*; give the folder of the weights, or give revision"):
        weights_digest(written(tmp_path, {"config.json": b"{}"}))
