"""The tables of docs/models.md, made from what `bench.engine.model_coverage` finds, and read back for the tests."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from textwrap import fill

from family_coverage import Coverage, Outcome, Way
from tiny_families import type_of

BEGIN, END = "<!-- the tables begin -->", "<!-- the tables end -->"
IMAGES_BEGIN, IMAGES_END = "<!-- the tables of images begin -->", "<!-- the tables of images end -->"
WIDTH = 120
EQUAL, WRONG, REFUSED, UNKNOWN = "Equal from every tier", "Wrong", "Refused", "Not examined"
SEEN, TEXT_ONLY = "Answers about images equal from every tier", "Texts run, images are refused"
NEITHER = "Texts and images are refused"
ENCODERS, ASIDE = "Encoders that load as decoders", "Refused encoders, and models without AttentionInterface"
# In a reason, what differs between models of one kind: the line of the model's code, and the size of a difference.
_DETAILS = re.compile(r" \([\w.]+, line \d+\)| by \d\.\de[-+]\d+ of the largest logit")
_OUTCOMES = {
    EQUAL: Outcome.EQUAL,
    WRONG: Outcome.WRONG,
    REFUSED: Outcome.REFUSED,
    UNKNOWN: Outcome.NOT_BUILT,
    ENCODERS: Outcome.EQUAL,
    ASIDE: Outcome.REFUSED,
    SEEN: Outcome.EQUAL,
    TEXT_ONLY: Outcome.REFUSED,
    NEITHER: Outcome.REFUSED,
}


def with_tables(page: str, tables: str, begin: str = BEGIN, end: str = END) -> str:
    """Return the page with the tables between its lines *begin* and *end*."""
    before, _, rest = page.partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_end:
        raise ValueError(f"the page has no lines {begin} and {end}")
    return f"{before}{begin}\n\n{tables}\n{end}{after}"


def tables_of(found: Iterable[Coverage]) -> str:
    """Return a section for each outcome: tables of the families that load, lists of those that are refused."""
    return _tables_in(found, (EQUAL, WRONG, REFUSED, UNKNOWN, ENCODERS, ASIDE), section_of)


def image_tables_of(found: Iterable[Coverage]) -> str:
    """Return the same for the types of models that see images, from what `image_coverage` finds."""
    return _tables_in(found, (SEEN, WRONG, TEXT_ONLY, NEITHER, UNKNOWN), image_section_of)


def _tables_in(found: Iterable[Coverage], titles: Sequence[str], title_of: Callable[[Coverage], str]) -> str:
    sections: dict[str, list[Coverage]] = {}
    for each in sorted(found, key=lambda each: each.family):
        sections.setdefault(title_of(each), []).append(each)
    texts = []
    for title in titles:
        if inside := sections.get(title):
            num_types = len({type_of(each.family) for each in inside})
            make = _table if title in (EQUAL, WRONG, ENCODERS, SEEN) else _list
            texts.append(f"### {title}\n\n{num_types} types.\n\n{make(inside)}")
    return "\n".join(texts)


def section_of(coverage: Coverage) -> str:
    """Return the title of the section that the family belongs to."""
    if not coverage.is_counted:
        return ENCODERS if coverage.is_encoder and coverage.outcome is Outcome.EQUAL else ASIDE
    by_outcome = {Outcome.EQUAL: EQUAL, Outcome.WRONG: WRONG, Outcome.REFUSED: REFUSED}
    return by_outcome.get(coverage.outcome, UNKNOWN)


def image_section_of(coverage: Coverage) -> str:
    """Return the title of the section that the type belongs to, among those of images."""
    if coverage.outcome is Outcome.REFUSED:
        return TEXT_ONLY if coverage.kinds else NEITHER
    return {Outcome.EQUAL: SEEN, Outcome.WRONG: WRONG}.get(coverage.outcome, UNKNOWN)


def sections_on(page: str, begin: str = BEGIN, end: str = END) -> dict[str, list[str]]:
    """Return the families in each section of the page's tables, by the section's title."""
    return {title: [each.family for each in _read(title, body)] for title, body in _bodies(page, begin, end)}


def families_on(page: str, begin: str = BEGIN, end: str = END) -> list[Coverage]:
    """Return what the page's tables say of each family; enough to make the same tables."""
    return [each for title, body in _bodies(page, begin, end) for each in _read(title, body)]


def _bodies(page: str, begin: str = BEGIN, end: str = END) -> list[tuple[str, str]]:
    tables = page.partition(begin)[2].partition(end)[0]
    parts = [section.partition("\n") for section in tables.split("\n### ")[1:]]
    return [(title, body) for title, _, body in parts]


def _read(title: str, body: str) -> Iterator[Coverage]:
    outcome = _OUTCOMES[title]
    is_encoder, lacks_interface = title == ENCODERS, title == ASIDE
    unknown_kinds = ["unknown"] if title == TEXT_ONLY else []
    for line in body.splitlines():
        if line.startswith("| `"):
            named, layers, *ways = (cell.strip() for cell in line.strip("|").split("|"))
            faults = {str(way): "no" for way, said in zip(Way, ways, strict=True) if said == "no"}
            kinds = layers.split(", ")
            yield Coverage(_family(named), outcome, "", kinds, faults, 0.0, 0, is_encoder, lacks_interface)
    for bullet in body.split("\n- ")[1:]:
        reason, _, names = " ".join(bullet.split()).rpartition(": `")
        for named in f"`{names}".removesuffix(".").split(", "):
            yield Coverage(_family(named), outcome, reason, unknown_kinds, {}, 0.0, 0, is_encoder, lacks_interface)


def _family(named: str) -> str:
    return named.replace("`", "")


def _table(inside: Sequence[Coverage]) -> str:
    heading = f"| type | layers | {' | '.join(Way)} |\n|---|---|{'---|' * len(Way)}\n"
    return heading + "".join(
        f"| {_named(each.family)} | {', '.join(each.kinds)} | "
        f"{' | '.join('no' if way in each.faults else 'yes' for way in Way)} |\n"
        for each in inside
    )


def _list(inside: Sequence[Coverage]) -> str:
    by_reason: dict[str, list[str]] = {}
    for each in inside:
        reason = _capitalized(_DETAILS.sub("", each.reason.replace("`", "'")).rstrip("."))
        by_reason.setdefault(reason, []).append(_named(each.family))
    ordered = sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    return "".join(_bullet(f"- {reason}: {', '.join(names)}.") for reason, names in ordered)


def _bullet(text: str) -> str:
    return fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _named(family: str) -> str:
    name, has_trait, trait = family.partition(" with ")
    return f"`{name}` with {trait}" if has_trait else f"`{name}`"
