"""docs/glossary.md and the table of words in DESIGN.md say the same."""

import re

from markdown_links import ROOT


def rows_of(page: str) -> list[list[str]]:
    """The cells of each row of the tables on *page*, without bold print."""
    lines = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")] for line in lines]


def entries_of(page: str) -> list[list[str]]:
    """The word and its meaning for each entry `- **word**: meaning` on *page*; `**a**, **b**` is the word `a, b`."""
    entries = re.findall(r"^- (\*\*.+?\*\*): (.+(?:\n  .+)*)$", (ROOT / page).read_text(), re.MULTILINE)
    return [[word.replace("**", ""), " ".join(meaning.split())] for word, meaning in entries]


def glossary() -> list[list[str]]:
    """The words of the glossary: meaning and other projects' words of those in the table, meaning of the others."""
    rows = [row for row in rows_of("docs/glossary.md") if row[0] != "kvtier"]
    return rows + entries_of("docs/glossary.md")


def test_the_glossary_has_each_word_of_the_design_with_vllms_and_lmcaches_words() -> None:
    design = (ROOT / "DESIGN.md").read_text().partition("## 3. Words")[2].partition("## 4.")[0]
    words = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\| .*\|$", design, re.M)][1:]
    ours = {word: rest for word, *rest in glossary()}

    assert words
    assert all(len(ours[word]) in (1, 3) for word, *_ in words if word in ours)
    assert [word for word, *_ in words if word not in ours] == []
    assert [
        (word, vllm, lmcache)
        for word, _, vllm, _, lmcache, _ in words
        if ours[word][1:] != [vllm, lmcache] and (len(ours[word]) == 3 or vllm or lmcache)
    ] == []


def test_each_word_is_explained_once() -> None:
    words = [row[0] for row in glossary()]

    assert sorted(set(words)) == sorted(words)


def test_each_entry_of_the_list_of_words_is_read() -> None:
    lines = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("- ")]

    assert len(entries_of("docs/glossary.md")) == len(lines) > 0
