"""The page docs/trip.md, generated: `python tests/support/trip_page.py` writes it anew.

Each step names the functions that a reader should read, in order. Their code is copied from the source.
"""

import ast
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "trip.md"


@dataclass(frozen=True)
class Step:
    """One step of a block's round trip: what happens, and the functions that do it, as `file: Class.function`."""

    title: str
    text: str
    functions: Sequence[str]


INTRODUCTION = """# A block's round trip

One block is computed, copied down to host memory and to disk, evicted from above, found again by a later prompt, and
promoted back. These are the functions that it passes, with the bookkeeping left out: about an hour's reading. The
page is generated from the source (`python tests/support/trip_page.py`), and a test runs the trip and checks that it
passes each of them. `python tests/support/block_trip.py --functions` lists all functions of the trip.

The device's side (steps 1, 2, 6, 7) talks to the tiers below it through one contract, `LowerTiers` in
`tiers/lower/lower_tiers.py`.
"""

STEPS = (
    Step(
        "Compute and name",
        "A request takes blank slots. After the step that fills a block, the block gets its name, a hash of the whole "
        "prefix, and later prompts can find it.",
        [
            "tiers/cache.py: TieredCache.allocate",
            "tiers/cache.py: TieredCache.commit",
            "tiers/residency.py: Residency.commit_run",
            "tiers/device/block_pool.py: BlockPool.commit",
        ],
    ),
    Step(
        "Release",
        "The request ends. Its slots join the end of the eviction order with their content intact, the tail of the "
        "prefix first, so that a block is evicted before the blocks that it continues.",
        [
            "tiers/cache.py: TieredCache.release",
            "tiers/device/block_pool.py: BlockPool.release",
            "tiers/device/eviction_order.py: EvictionOrder.append_few",
        ],
    ),
    Step(
        "Spill to host memory",
        "Blocks near the eviction end are copied to host slots before their device slots are needed. A batch leases "
        "both ends of each copy until it has ended.",
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
        "When the bytes are complete and digested, the block can be found in host memory, and is offered to the disk.",
        [
            "tiers/lower/local_tiers.py: LocalTiers.reserve",
            "tiers/down/host_spill.py: HostSpill._on_copied",
            "tiers/lower/local_tiers.py: LocalTiers.publish",
            "tiers/lower/lower_index.py: LowerIndex.offer_to_disk",
        ],
    ),
    Step(
        "Write to disk",
        "A batch of blocks goes to the store. The payload is written to a slot that no record has; then index, order "
        "and counters change in one transaction.",
        [
            "tiers/lower/disk_spill.py: DiskSpill._start",
            "tiers/lower/disk_spill.py: DiskSpill._work",
            "store/lmdb/writer.py: LmdbWriter._put_at_once",
            "store/lmdb/writer.py: LmdbWriter._write",
            "store/lmdb/change.py: Change.allocate",
            "store/lmdb/change.py: Change.add",
            "store/lmdb/change.py: Change._append",
            "tiers/lower/disk_spill.py: DiskSpill._on_written",
        ],
    ),
    Step(
        "Evict",
        "A slot is needed. The oldest free block loses its name, and stays findable below. If nothing below holds it, "
        "the block is remembered as a ghost with the cause.",
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
        "The block is read from disk into a leased host slot, verified against its key, copied to a device slot, "
        "verified against its digest, and published. The request computes only the rest of the prompt.",
        [
            "tiers/up/promoter.py: Promoter.promote",
            "tiers/up/promoter.py: Promoter._start_part",
            "tiers/lower/local_tiers.py: Fetches.begin",
            "tiers/lower/reads.py: Reads._submit",
            "store/codec/seal.py: unseal",
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
        parts.append(f"\n## {number}. {step.title}\n\n{textwrap.fill(step.text, 120)}\n")
        for function in step.functions:
            file, _, name = function.partition(": ")
            summary, code = _quoted(file, name)
            num_lines += len(code.splitlines())
            parts.append(f"\n`{name}` in `{file}`: {summary}\n\n```python\n{code}\n```\n")
    parts.append(f"\n{len(named_functions())} functions, {num_lines} lines of code.\n")
    return "".join(parts)


def _quoted(file: str, name: str) -> tuple[str, str]:
    """The first line of a function's docstring, and its code without the docstring."""
    source = (ROOT / file).read_text()
    node = dict(_definitions(ast.parse(source), ""))[name]
    lines = source.splitlines()
    docstring = ast.get_docstring(node) or ""
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    code = lines[first - 1 : node.end_lineno]
    if docstring:
        own = node.body[0]
        del code[own.lineno - first : (own.end_lineno or own.lineno) - first + 1]
    summary = docstring.partition("\n")[0] or "implements the contract."
    return summary[:1].lower() + summary[1:], textwrap.dedent("\n".join(code))


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")


if __name__ == "__main__":
    PAGE.write_text(generated_page())
