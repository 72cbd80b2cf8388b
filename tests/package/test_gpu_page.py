"""The format of results that docs/gpu.md shows is that of the committed results."""

import json

from markdown_links import ROOT, examples_of


def test_the_example_of_a_result_has_the_keys_of_a_committed_result() -> None:
    (example,) = map(json.loads, examples_of(ROOT / "docs" / "gpu.md", "json"))

    result = json.loads((ROOT / "bench" / "results" / "store.json").read_text())

    assert example.keys() == result.keys()
    assert example["rows"][0].keys() == result["rows"][0].keys()
