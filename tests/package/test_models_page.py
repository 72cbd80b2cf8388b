"""The page of models has each type once, and says what a run of the command finds."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_sidecar import started_sidecar
from family_coverage import Coverage, Outcome, Way, cover
from markdown_links import ROOT
from models_page import BEGIN, END, families_on, section_of, sections_on, tables_of, with_tables
from tiny_families import CAUSAL_TYPES, FAMILIES

PAGE = ROOT / "docs" / "models.md"


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("sidecar")
    with started_sidecar(folder, str(folder / "own.sock")):
        yield f"unix://{folder / 'own.sock'}"


def test_each_type_of_causal_model_is_on_the_page_once() -> None:
    found = Counter(family for families in sections_on(PAGE.read_text()).values() for family in families)

    assert set(CAUSAL_TYPES) <= set(found)
    assert found == Counter(FAMILIES)


# Full attention, windows, chunks, latent rows; an encoder; two refusals.
@pytest.mark.long
@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "llama4_text", "deepseek_v3", "phi3 with LongRoPE", "electra", "doge", "bloom"]
)
def test_a_family_is_in_the_section_where_a_run_of_the_command_puts_it(
    family: str, sidecar: str, tmp_path: Path
) -> None:
    coverage = cover(family, tmp_path, sidecar)

    (section,) = (title for title, families in sections_on(PAGE.read_text()).items() if family in families)
    assert section == section_of(coverage)
    assert coverage.faults == {}


def test_the_tables_can_be_read_back() -> None:
    found = [
        Coverage("llama", Outcome.EQUAL, kinds=["full"]),
        Coverage("phi3", Outcome.EQUAL, kinds=["window"]),
        Coverage("phi3 with LongRoPE", Outcome.EQUAL, kinds=["full"]),
        Coverage("opt", Outcome.WRONG, kinds=["full"], faults={str(Way.DISK): "token 2 is 7, not 9"}),
        Coverage("doge", Outcome.REFUSED, "layer 0 has a mask: " + 20 * "long " + "(Doge.forward, line 7)"),
        Coverage("dory", Outcome.REFUSED, "layer 0 has a mask: " + 20 * "long " + "(Dory.forward, line 9)"),
        Coverage("gemma3n", Outcome.NOT_BUILT, "it needs `timm`."),
        Coverage("marian", Outcome.FAILED, "no end"),
        Coverage("bert", Outcome.EQUAL, kinds=["full"], is_encoder=True),
        Coverage("roberta", Outcome.REFUSED, "other positions", is_encoder=True),
        Coverage("bloom", Outcome.REFUSED, "no interface", lacks_interface=True),
        Coverage("got_ocr2", Outcome.EQUAL, kinds=["full"], lacks_interface=True),
    ]
    page = with_tables(f"# Models\n\n{BEGIN}\nold\n{END}\n\n## More `words`\n", tables_of(found))

    assert sections_on(page) == {
        "Equal from every tier": ["got_ocr2", "llama", "phi3", "phi3 with LongRoPE"],
        "Wrong": ["opt"],
        "Refused": ["doge", "dory"],
        "Not examined": ["gemma3n", "marian"],
        "Encoders that load as decoders": ["bert"],
        "Refused encoders, and models without AttentionInterface": ["bloom", "roberta"],
    }
    assert "3 types." in page  # phi3 counts once
    assert "| `opt` | full | yes | yes | yes | no | yes | yes | yes |" in page
    assert f"- Layer 0 has a mask: {'long ' * 20}".strip() + ": `doge`, `dory`." in " ".join(page.split())
    assert max(map(len, page.splitlines())) <= 120
    assert with_tables(page, tables_of(families_on(page))) == page


def test_a_page_without_markers_is_not_written() -> None:
    with pytest.raises(ValueError, match="the page has no lines"):
        with_tables("# Models\n", tables_of([]))
