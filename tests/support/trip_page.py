"""The page docs/trip.md, generated: `python tests/support/trip_page.py` writes it anew.

Each step names the functions that a reader should read, in order. Their code is copied from the source.
"""

import ast
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markdown_links import ROOT
from page_text import paragraph

PAGE = ROOT / "docs" / "trip.md"
INTERFACE = ("tiers/lower/lower_tiers.py", "LowerTiers")
"""The interface whose docstrings describe functions that implement it and have none of their own."""


@dataclass(frozen=True)
class Step:
    """One step of a block's round trip: what happens, and the functions that do it, as `file: Class.function`."""

    title: str
    text: str
    functions: Sequence[str]


INTRODUCTION = """# A block's round trip

This page follows one block of the KV cache. The block is computed, copied down to host memory and to disk, evicted
from the device and from host memory, found again by a later prompt, and promoted back. The page quotes the functions
that do this, without most of the bookkeeping. Reading it takes about an hour. The [glossary](glossary.md) explains
words such as *slot*, *lease* and *spill*.

The page is generated from the source (`python tests/support/trip_page.py`). A test runs the trip, and checks that it
passes each quoted function. `python tests/support/block_trip.py --functions` lists all functions of the trip.

The device's side (steps 1, 2, 6 and 7) calls the lower tiers through one interface: `LowerTiers` in
`tiers/lower/lower_tiers.py`.
"""

STEPS = (
    Step(
        "Compute and name",
        "A request takes blank slots. Each slot is the memory for one block. After the step that fills a block, the "
        "block gets its name, which is a hash of the whole prefix. From then on, later prompts can find the block.",
        [
            "tiers/cache.py: TieredCache.allocate",
            "tiers/cache.py: TieredCache.commit",
            "tiers/residency.py: Residency.commit_run",
            "tiers/device/block_pool.py: BlockPool.commit",
        ],
    ),
    Step(
        "Release",
        "The request ends. Its slots join the end of the eviction order, and keep their content. The tail of the "
        "prefix joins first, so a block is evicted before the blocks that precede it.",
        [
            "tiers/cache.py: TieredCache.release",
            "tiers/device/block_pool.py: BlockPool.release",
            "tiers/device/eviction_order.py: EvictionOrder.append_few",
        ],
    ),
    Step(
        "Spill to host memory",
        "Blocks that will be evicted soon are copied to host slots before their device slots are needed. A batch of "
        "copies leases all source and destination slots until it has ended. A leased slot keeps its content.",
        [
            "tiers/down/host_spill.py: HostSpill.spill",
            "tiers/down/host_spill.py: HostSpill._clean",
            "tiers/down/host_spill.py: HostSpill._start",
            "tiers/down/host_spill.py: HostBatch.copy_down",
            "transfer/transfer_engine.py: TransferEngine.submit",
        ],
    ),
    Step(
        "Publish in host memory",
        "When a block's bytes are complete and have a digest, lookups can find the block in host memory. Then the "
        "block is offered to the disk.",
        [
            "tiers/lower/local_tiers.py: LocalTiers.reserve",
            "tiers/down/host_spill.py: HostSpill._on_copied",
            "tiers/lower/local_tiers.py: LocalTiers.publish",
            "tiers/lower/lower_index.py: LowerIndex.offer_to_disk",
        ],
    ),
    Step(
        "Write to disk",
        "A batch of blocks goes to the store. It reserves slots that no record has, and several threads write the "
        "blocks' bytes to them. Then index, eviction order and counters change in one transaction.",
        [
            "tiers/lower/disk_spill.py: DiskSpill._start",
            "tiers/lower/disk_spill.py: DiskSpill._work",
            "store/lmdb/writer.py: LmdbWriter._put_at_once",
            "store/lmdb/files.py: LmdbFiles.reserve",
            "store/lmdb/writer.py: LmdbWriter._write",
            "store/lmdb/writer.py: LmdbWriter._enter",
            "store/lmdb/change.py: Change.take",
            "store/lmdb/change.py: Change.add",
            "tiers/lower/disk_spill.py: DiskSpill._on_written",
        ],
    ),
    Step(
        "Evict",
        "A device slot is needed. The oldest free block loses its slot, but lookups still find it in lower tiers. If "
        "no lower tier has the block, kvtier keeps a *ghost*: the record of an evicted block, with the cause.",
        [
            "tiers/device/group_slots.py: GroupSlots.evict",
            "tiers/device/block_pool.py: BlockPool.evict",
            "tiers/residency.py: Residency._on_left_device",
        ],
    ),
    Step(
        "Look up",
        "A later prompt with the same prefix asks for the longest prefix that can be resumed, over all tiers at once.",
        [
            "tiers/lookups.py: Lookups.lookup",
            "tiers/residency.py: Residency.locate",
            "tiers/lower/lower_index.py: LowerIndex.find_run",
        ],
    ),
    Step(
        "Promote",
        "The block is read from disk into a leased host slot and verified against its key. Then it is verified against "
        "its digest, copied to a device slot, and published. The request computes only the rest of the prompt.",
        [
            "tiers/up/promoter.py: Promoter.promote",
            "tiers/up/promoter.py: Promoter._start_part",
            "tiers/lower/local_tiers.py: Fetches.begin",
            "tiers/lower/reads.py: Reads._submit",
            "store/lmdb/reader.py: LmdbReader._read_now",
            "tiers/lower/reads.py: Reads._on_read",
            "tiers/up/uploads.py: Uploads._submit_upload",
            "tiers/up/uploads.py: verify_blocks",
            "tiers/up/uploads.py: Uploads._publish",
            "tiers/residency.py: Residency.publish",
        ],
    ),
)


def named_functions() -> list[str]:
    """All functions that the page quotes."""
    return [function for step in STEPS for function in step.functions]


def generated_page() -> str:
    """The page as the source is now."""
    parts = [INTRODUCTION]
    num_lines = 0
    for number, step in enumerate(STEPS, 1):
        parts.append(f"\n## {number}. {step.title}\n\n{paragraph(step.text)}")
        for function in step.functions:
            file, _, name = function.partition(": ")
            summary, code = _quoted(file, name)
            num_lines += len(code.splitlines())
            text = paragraph(f"**`{name}`** in `{file}`: {summary}")
            parts.append(f"\n{text}\n```python\n{code}\n```\n")
    parts.append(f"\n{len(named_functions())} functions, {num_lines} lines of code.\n")
    return "".join(parts)


def _quoted(file: str, name: str) -> tuple[str, str]:
    """Return the first line of a function's docstring, and its code without the docstring."""
    node, lines = _function(file, name)
    docstring = ast.get_docstring(node) or ""
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    code = lines[first - 1 : node.end_lineno]
    if docstring:
        own = node.body[0]
        del code[own.lineno - first : (own.end_lineno or own.lineno) - first + 1]
    else:
        contract, interface = INTERFACE
        implemented, _ = _function(contract, f"{interface}.{name.rpartition('.')[2]}")
        docstring = ast.get_docstring(implemented) or ""
    summary = docstring.partition("\n")[0]
    return summary[:1].lower() + summary[1:], textwrap.dedent("\n".join(code))


def _function(file: str, name: str) -> tuple[ast.FunctionDef, list[str]]:
    """Return the definition of a function, and the lines of its file."""
    source = (ROOT / file).read_text()
    return dict(_definitions(ast.parse(source), ""))[name], source.splitlines()


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")


if __name__ == "__main__":
    PAGE.write_text(generated_page())
