"""docs/glossary.md and the table of words in DESIGN.md say the same."""

import re

from markdown_links import ROOT


def rows_of(page: str) -> list[list[str]]:
    """The cells of each row of the tables on *page*, without bold print."""
    lines = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")] for line in lines]


def test_the_glossary_has_each_word_of_the_design_with_vllms_and_lmcaches_words() -> None:
    design = (ROOT / "DESIGN.md").read_text().partition("## 3. Words")[2].partition("## 4.")[0]
    words = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\| .*\|$", design, re.M)][1:]
    glossary = {row[0]: row for row in rows_of("docs/glossary.md")}

    assert words
    assert all(len(glossary[word]) in (2, 4) for word, *_ in words if word in glossary)
    assert [word for word, *_ in words if word not in glossary] == []
    assert [
        (word, vllm, lmcache)
        for word, _, vllm, _, lmcache, _ in words
        if len(glossary[word]) == 4 and glossary[word][2:] != [vllm, lmcache]
    ] == []


def test_each_word_is_explained_once() -> None:
    words = [row[0] for row in rows_of("docs/glossary.md") if row[0] not in ("kvtier", "word")]

    assert sorted(set(words)) == sorted(words)
