"""The page of models has each type once, and says what a run of the command finds."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_sidecar import started_sidecar
from family_coverage import Coverage, Outcome, Way, cover
from image_coverage import SEEING_TYPES, cover_images
from markdown_links import ROOT
from models_page import (
    BEGIN,
    END,
    IMAGES_BEGIN,
    IMAGES_END,
    SEEN,
    families_on,
    image_section_of,
    image_tables_of,
    section_of,
    sections_on,
    tables_of,
    with_tables,
)
from tiny_families import CAUSAL_TYPES, FAMILIES
from vision_models import IN_PROMPT

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


def test_each_type_of_model_with_images_is_on_the_page_once() -> None:
    sections = sections_on(PAGE.read_text(), IMAGES_BEGIN, IMAGES_END)

    assert Counter(family for families in sections.values() for family in families) == Counter(SEEING_TYPES)
    assert sections[SEEN] == sorted(IN_PROMPT)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llava", "gemma3", "mllama"])
def test_a_type_whose_images_are_refused_is_in_the_section_of_the_page(family: str, tmp_path: Path) -> None:
    coverage = cover_images(family, tmp_path, "no sidecar")

    (found,) = [each for each in families_on(PAGE.read_text(), IMAGES_BEGIN, IMAGES_END) if each.family == family]
    assert coverage.outcome is Outcome.REFUSED
    assert image_section_of(found) == image_section_of(coverage)
    assert found.reason.lower() == coverage.reason.lower()


@pytest.mark.slow
def test_answers_about_images_are_right_in_every_way(sidecar: str, tmp_path: Path) -> None:
    coverage = cover_images("qwen3_vl", tmp_path, sidecar)

    assert (coverage.outcome, coverage.faults) == (Outcome.EQUAL, {})


def test_the_tables_of_images_can_be_read_back() -> None:
    found = [
        Coverage("qwen3_vl", Outcome.EQUAL, kinds=["full"]),
        Coverage("llava", Outcome.REFUSED, "kvtier cannot write prompts", kinds=["full"]),
        Coverage("blip", Outcome.REFUSED, "it does not run on token ids alone"),
        Coverage("gemma3n", Outcome.NOT_BUILT, "it needs timm"),
    ]
    begin, end = IMAGES_BEGIN, IMAGES_END
    page = with_tables(f"# Models\n\n{begin}\nold\n{end}\n", image_tables_of(found), begin, end)

    assert sections_on(page, begin, end) == {
        SEEN: ["qwen3_vl"],
        "Texts run, images are refused": ["llava"],
        "Texts and images are refused": ["blip"],
        "Not examined": ["gemma3n"],
    }
    assert with_tables(page, image_tables_of(families_on(page, begin, end)), begin, end) == page


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
