"""Do the tests find bugs? Plants bugs into a copy of the source, one at a time, and says which test caught each.

Run it with `make planted-bugs`. A bug that no test catches is a hole in the tests; the exit status says so.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("configs", "engine", "store", "tiers", "transfer")


@dataclass(frozen=True)
class Bug:
    """One change to one file, and the tests that are asked to find it."""

    what: str
    file: str
    right: str
    wrong: str
    tests: str


BUGS = [
    Bug(
        "a promoted block is published although its copy failed",
        "tiers/up/uploads.py",
        "self._finish(batch, transfer.result if transfer.error is None else [None] * len(batch))",
        "self._finish(batch, transfer.result if transfer.error is None else [True] * len(batch))",
        "tests/tiers",
    ),
    Bug(
        "host blocks are uploaded without looking at their digest",
        "tiers/up/uploads.py",
        "return [digest(memory.host_block(slot)) == known for",
        "return [bool(known) for",
        "tests/tiers/test_cache_random.py",
    ),
    Bug(
        "an abandoned promotion keeps its lease on blocks under way",
        "tiers/up/promoter.py",
        "promotion.failure = failure\n    upload.group.pool.release(",
        "promotion.failure = failure\n    print(",
        "tests/tiers/test_cache_random.py",
    ),
    Bug(
        "a block can be found before its bytes have arrived",
        "tiers/up/uploads.py",
        "            under_way[name] = upload\n",
        "            under_way[name] = upload\n            group.pool.commit([device_slot], [name])\n",
        "tests/tiers/test_cache_random.py",
    ),
    Bug(
        "a slot that is being spilled may be given away",
        "tiers/device/eviction_order.py",
        "        self._is_lent[ids] = True\n",
        "",
        "tests/tiers/device/test_block_pool.py",
    ),
    Bug(
        "the store does not verify what it reads",
        "store/codec/seal.py",
        "return known if digest(out) == known else Fault.CORRUPT",
        "return known",
        "tests/store",
    ),
    Bug(
        "the sliding window is one token too long",
        "engine/model/paged_segment.py",
        "mask &= keys > queries - window",
        "mask &= keys >= queries - window",
        "tests/engine/test_equality.py",
    ),
    Bug(
        "the salt is left out of the first block's name",
        "tiers/naming/block_hash.py",
        "if self.cache_salt is not None and start == 0:",
        "if self.cache_salt is not None and start < 0:",
        "tests/tiers/naming/test_block_hash.py",
    ),
    Bug(
        "a window is thought to need one block less",
        "tiers/naming/groups.py",
        "num_tokens - self.window_tokens + 1",
        "num_tokens - self.window_tokens + self.block_size",
        "tests/tiers/naming/test_groups.py",
    ),
    Bug(
        "the tail of a prefix is evicted last",
        "tiers/cache.py",
        "slots = _ids(table)[::-1]",
        "slots = _ids(table)",
        "tests/tiers",
    ),
    Bug(
        "a block computed twice is kept twice, so that a prefix can go before what continues it",
        "tiers/cache.py",
        "pool.release([table[start + place]])\n            table[start + place] = holder\n",
        "pool.release([holder])\n",
        "tests/tiers/test_cache.py",
    ),
    Bug(
        "a part of a block is shared with prompts of another salt",
        "tiers/naming/block_hash.py",
        "if block_id < self._num_keyed and (keys := self._keys(block_id)):\n            return",
        "if False and (keys := self._keys(block_id)):\n            return",
        "tests/tiers",
    ),
    Bug(
        "tokens of a block that were never computed are shared",
        "tiers/device/partial_matches.py",
        "self._num_tokens[slot] = len(token_ids)",
        "self._num_tokens[slot] = self._token_ids.shape[1]",
        "tests/tiers",
    ),
    Bug(
        "pages of the last checkpoint may be overwritten",
        "store/lmdb/checkpoint.py",
        "        self._reader = reader\n",
        "        reader.abort()\n",
        "tests/store/lmdb/test_durability.py",
    ),
    Bug(
        "slots of the last checkpoint may be overwritten",
        "store/lmdb/files.py",
        "Change(self.tables, txn, self._synced_change)",
        "Change(self.tables, txn, None)",
        "tests/store/lmdb/test_durability.py",
    ),
    Bug(
        "a file that nobody synced is believed after a crash of the machine",
        "store/lmdb/boot_mark.py",
        "self.boot_id != current_boot_id()",
        "not self.boot_id",
        "tests/store",
    ),
    Bug(
        "what is put where no reader looks is thought to be there",
        "store/lmdb/writer.py",
        "            change.find_again(blob.key for blob in new)\n",
        "",
        "tests/torture/test_bit_flips.py",
    ),
    Bug(
        "a record may leave the disk before the one that continues it",
        "store/lmdb/change.py",
        "        if row.parent and row.parent not in coming:\n            self.mark(row.parent)\n",
        "",
        "tests/store/test_store_contract.py",
    ),
    Bug(
        "what the disk drops is not told, and is looked for there",
        "tiers/lower/lower_index.py",
        "            self.disk.index.remove(group_id, name)\n",
        "",
        "tests/tiers",
    ),
    Bug(
        "a page of the disk's index brings back what has left meanwhile",
        "tiers/lower/disk_index.py",
        "        if gone is not None:\n            rows = rows[~gone.holds(rows)]\n",
        "",
        "tests/tiers/lower/test_disk_tier.py",
    ),
    Bug(
        "a record of another encryption key counts as damaged, and is deleted",
        "store/record.py",
        "Fault.KEY, ",
        "",
        "tests/store",
    ),
    Bug(
        "what was computed on a prefix that turned out damaged counts",
        "engine/scheduling/loading.py",
        "if promotion.done and came == (request.num_committed, request.num_computed - request.num_committed):",
        "if promotion.done:",
        "tests/engine/model/test_by_layers.py",
    ),
    Bug(
        "a layer is computed before its blocks have arrived",
        "transfer/layer_gate.py",
        "part = layer * self.num_parts // num_layers",
        "part = -1",
        "tests/transfer/test_layer_gate.py",
    ),
    Bug(
        "a request waits for the probe of a disk that hung",
        "tiers/lower/disk_tier.py",
        "return self.reading.state is BreakerState.CLOSED",
        "return self.reading.allows()",
        "tests/engine/scheduling/test_liveness.py",
    ),
    Bug(
        "a block whose read hangs is waited for again",
        "tiers/lower/disk_reads.py",
        "                self._index.remove_from_disk_index(disk_read.group_id, disk_read.name)\n"
        "                self._end(disk_read, Reason.DEADLINE)\n",
        "",
        "tests/engine/scheduling/test_liveness.py",
    ),
    Bug(
        "loads wait for host slots behind a write that hangs",
        "tiers/lower/disk_reads.py",
        "and not self._is_host_cleaned():",
        "and not self._transfers.num_pending(Route.HOST_TO_DISK):",
        "tests/engine/scheduling/test_liveness.py",
    ),
    Bug(
        "blocks are looked for below the device although nothing comes up",
        "tiers/up/uploads.py",
        "        self._residency.is_cut_off = True\n",
        "",
        "tests/engine/scheduling/test_liveness.py",
    ),
    Bug(
        "a request waits for room as long as a disk is slow",
        "engine/scheduling/loading.py",
        "ROOM_SHARE * self._around.most_s",
        "self._around.most_s",
        "tests/engine/scheduling/test_liveness.py",
    ),
    Bug(
        "the time of a load passes while another request asks for room",
        "engine/scheduling/scheduler.py",
        "            asked.wait_turn()\n",
        "            pass\n",
        "tests/engine/scheduling/test_liveness.py",
    ),
    Bug(
        "a request that began early in vain keeps the slots of that step",
        "engine/scheduling/loading.py",
        "        self._cache.release(self._early_slots)\n",
        "",
        "tests/engine/scheduling/test_loading.py",
    ),
    Bug(
        "what another write has pushed out of the disk is said to be there",
        "tiers/lower/disk_spill.py",
        "[name for name in batch.names if name not in batch.pushed_out]",
        "list(batch.names)",
        "tests/tiers/test_cache.py",
    ),
    Bug(
        "a lane's thread ends with the work that wants it to",
        "transfer/lane.py",
        "except BaseException as error:",
        "except OSError as error:",
        "tests/transfer/test_lane.py",
    ),
    Bug(
        "a thread of a lane that comes back after its close never ends",
        "transfer/lane.py",
        "self._queue.put(None)  # a thread that comes back",
        "pass  # a thread that comes back",
        "tests/transfer/test_lane.py",
    ),
    Bug(
        "what was delivered is still thought to be queued on its route",
        "transfer/transfer_engine.py",
        "self._pending_bytes[route] -= num_bytes",
        "pass",
        "tests/transfer/test_transfer_engine.py",
    ),
    Bug(
        "one lane that hangs is no hang while another has ended",
        "transfer/transfer_engine.py",
        "return all(closed)",
        "return any(closed)",
        "tests/transfer/test_transfer_engine.py",
    ),
    Bug(
        "a document waits behind all others for ever",
        "engine/documents/prefills.py",
        "core.set_priority(running.request, ORDINARY)",
        "pass",
        "tests/engine/documents/test_documents.py",
    ),
    Bug(
        "who waits for a thread that raises StopIteration waits for ever",
        "engine/thread_work.py",
        "not isinstance(error, (StopIteration, CancelledError))",
        "not isinstance(error, CancelledError)",
        "tests/engine/text/test_tokenizer_threads.py",
    ),
    Bug(
        "a question that wants to end its thread ends the engine, and is never answered",
        "engine/async_llm.py",
        "except BaseException as error:  # the asker's mistake",
        "except Exception as error:  # the asker's mistake",
        "tests/engine/test_cancelling.py",
    ),
    Bug(
        "two servers may have one folder of documents",
        "engine/documents/file.py",
        "undo.callback(OwnerLock(self._folder).release)",
        "pass",
        "tests/engine/documents/test_documents.py",
    ),
    Bug(
        "a split request goes on before the rest of its prefix has been loaded",
        "engine/scheduling/loading.py",
        "if promotion is None or not promotion.done:",
        "if promotion is None or not (promotion.done or self.state is State.SPLIT):",
        "tests/engine/scheduling/test_split.py",
    ),
    Bug(
        "the rest of a split prefix is released as if its beginning were younger",
        "tiers/cache.py",
        "        self._promoter.on_released(promotion)\n",
        "",
        "tests/tiers/test_splits.py",
    ),
    Bug(
        "blocks of an adapter are named by its name only",
        "engine/model/lora_adapter.py",
        'key = Lora(name, f"sha256:{deltas_digest(deltas)}")',
        'key = Lora(name, "")',
        "tests/engine/model/test_lora.py",
    ),
    Bug(
        "logits of a batch that was sorted by adapter stay sorted",
        "engine/model/runner.py",
        "in_place[order] = logits",
        "in_place = logits",
        "tests/engine/model/test_lora.py",
    ),
    Bug(
        "what is queued on a lane is not counted when a load is planned",
        "tiers/up/load_planner.py",
        "(num_bytes + queued_bytes) / (speed",
        "num_bytes / (speed",
        "tests/tiers/up/test_load_planner.py",
    ),
    Bug(
        "a probe that its lane refused is never tried again",
        "tiers/lower/disk_probe.py",
        "            del self._under_way[block]\n            disk.reading.withdraw(attempt)",
        "            pass",
        "tests/tiers/test_mishaps.py",
    ),
    Bug(
        "a page of the index that its lane refused keeps the breaker's probe",
        "tiers/lower/index_load.py",
        "self._disk.reading.withdraw(attempt)",
        "pass",
        "tests/tiers/lower/test_disk_tier.py",
    ),
    Bug(
        "a write that its lane refused keeps the breaker's probe",
        "tiers/lower/disk_spill.py",
        "self._disk.writing.withdraw(batch.attempt)",
        "pass",
        "tests/tiers/test_mishaps.py",
    ),
    Bug(
        "a block that could not be verified beside its copy counts as right",
        "tiers/up/uploads.py",
        "layered.on_verified(batch, transfer.result if transfer.error is None else [None] * len(batch))",
        "layered.on_verified(batch, transfer.result if transfer.error is None else [True] * len(batch))",
        "tests/tiers/test_mishaps.py",
    ),
    Bug(
        "what was computed without a layer that came too late counts",
        "tiers/up/layered_upload.py",
        " and not self.gate.missed",
        "",
        "tests/tiers/test_mishaps.py",
    ),
    Bug(
        "a device block whose host copy was evicted is thought to have one still",
        "tiers/lower/lower_index.py",
        "self._lost.append(Lost(group_id, gone, Tier.HOST))\n",
        "pass\n",
        "tests/tiers/test_mishaps.py",
    ),
    Bug(
        "a device block whose record was found bad is thought to have one still",
        "tiers/lower/disk_reads.py",
        "self._index.on_read_failed(disk_read.group_id, disk_read.name, outcome)",
        "pass",
        "tests/tiers/test_mishaps.py",
    ),
    Bug(
        "a held block whose read failed is forgotten",
        "tiers/pins.py",
        "        leases.is_coming[place] = False\n",
        "        if failure is not None:\n            return\n        leases.is_coming[place] = False\n",
        "tests/tiers/test_mishaps.py",
    ),
    Bug(
        "slots that are kept for what a promotion has still to bring up are given to others",
        "tiers/device/block_pool.py",
        " - self.num_reserved\n",
        "\n",
        "tests/tiers/test_parts.py",
    ),
    Bug(
        "host memory may forget what a promotion has still to bring up",
        "tiers/up/backlog.py",
        "fetch = self._lower.fetch(group.id, wanted, self._on_fetched, found)",
        "fetched = fetched[:0]",
        "tests/tiers/test_parts.py",
    ),
    Bug(
        "who leaves a promotion takes the slots of another's blocks with it",
        "tiers/up/backlog.py",
        "is_unwanted = ~self.are_coming(promotion.chain, group, ids)",
        "is_unwanted = np.ones(len(ids), np.bool_)",
        "tests/tiers/test_parts.py",
    ),
    Bug(
        "the eviction end of the device is not looked at again after a copy below was lost",
        "tiers/down/host_spill.py",
        " and known.num_lost == group.slots.num_lost",
        "",
        "tests/tiers",
    ),
    Bug(
        "the eviction end of the device is not looked at again after a copy failed",
        "tiers/down/host_spill.py",
        "        self._clean_fronts[batch.group] = CleanFront()\n",
        "",
        "tests/tiers",
    ),
    Bug(
        "a block that leaves the eviction end for a request is evicted with those around it",
        "tiers/device/eviction_order.py",
        "if place < self._front_end:  # noqa",
        "if False:  # noqa",
        "tests/tiers/device/test_block_pool.py",
    ),
    Bug(
        "what a row of blocks in host memory continues is forgotten",
        "tiers/lower/local_tiers.py",
        "names = row.names[::-1] if row.parent is None else [row.parent, *reversed(row.names)]",
        "names = row.names[::-1]",
        "tests/tiers",
    ),
    Bug(
        "a host block gets the digest of another one of its row",
        "tiers/lower/local_tiers.py",
        'b"".join(reversed(digests[row.start : row.end]))',
        'b"".join(digests[row.start : row.end])',
        "tests/tiers/test_cache.py",
    ),
    Bug(
        "what the host had no slot for counts as copied down",
        "tiers/down/host_spill.py",
        "return is_all",
        "return True",
        "tests/tiers/test_cache.py",
    ),
    Bug(
        "of a run that is evicted in several pieces each piece is taken out alone",
        "tiers/device/runs.py",
        "num_gone[run_id] = num_gone.get(run_id, 0) + end - start",
        "self._shrink(run_id, end - start)",
        "tests/tiers/device/test_runs.py",
    ),
    Bug(
        "what a full store evicted in vain is looked for there",
        "tiers/lower/disk_spill.py",
        "self._index.on_written(group_id, (), transfer.error.evicted)",
        "pass",
        "tests/tiers/test_mishaps.py",
    ),
    Bug(
        "a disk whose writes hang is not left alone",
        "tiers/lower/disk_spill.py",
        "self._disk.writing.on_hung(batch.attempt)",
        "pass",
        "tests/tiers/test_mishaps.py",
    ),
    Bug(
        "a copy by layers that failed counts as one that went well",
        "tiers/up/uploads.py",
        "layered.on_copied(transfer.error is None)",
        "layered.on_copied(True)",
        "tests/tiers/test_mishaps.py",
    ),
    Bug(
        "an upload that its lane refused is forgotten",
        "tiers/up/uploads.py",
        "        if submitted:\n            self._on_lane.update(dict.fromkeys(batch, self._clock()))\n",
        "        if True:\n",
        "tests/tiers/test_mishaps.py",
    ),
    Bug(
        "a device block whose record the disk dropped is thought to have one still",
        "tiers/lower/lower_index.py",
        "self._lost.append(Lost(group_id, [name], Tier.DISK))\n\n    def remove_from_disk_index(",
        "pass\n\n    def remove_from_disk_index(",
        "tests/tiers/test_mishaps.py",
    ),
    Bug(
        "what has left the tiers below while it came up is thought to have a copy there still",
        "tiers/residency.py",
        "if not is_below.all():",
        "if False:",
        "tests/tiers/test_mishaps.py",
    ),
    Bug(
        "a hit that is out of date leases the host slots that its blocks were in",
        "tiers/up/hits.py",
        "        if hit.as_of == self._residency.num_changes:\n            return [\n",
        "        if True:\n            return [\n",
        "tests/tiers/test_places_out_of_date.py",
    ),
    Bug(
        "a hit that is out of date refreshes the blocks that are in its host slots now",
        "tiers/up/promoter.py",
        "        if hit.as_of != self._residency.num_changes:\n            return\n",
        "",
        "tests/tiers/test_places_out_of_date.py",
    ),
    Bug(
        "when all below is void the device's blocks are thought to have copies still",
        "tiers/residency.py",
        "if self._epoch != self.lower.epoch:",
        "if False:",
        "tests/tiers/test_late_disk.py",
    ),
    Bug(
        "a fetch that is let go of before it is answered keeps its reads",
        "tiers/lower/local_fetch.py",
        "self._disk_reads.leave(disk_read, self)",
        "pass",
        "tests/tiers",
    ),
    Bug(
        "what was in a store whose folder is gone is still looked for",
        "tiers/lower/disk_tier.py",
        "        self.index.begin_again()\n",
        "",
        "tests/tiers/test_late_disk.py",
    ),
    Bug(
        "what is above is not written to a store that was opened anew",
        "tiers/lower/index_load.py",
        "self._forsaken = self._index.offer_all_to_disk(SLOTS_AT_ONCE)",
        "pass",
        "tests/tiers/test_late_disk.py",
    ),
    Bug(
        "nobody notices that the store's folder is gone",
        "engine/reopening_store.py",
        "while folder.is_there():",
        "while True:",
        "tests/engine/test_reopening_store.py",
    ),
    Bug(
        "who closes a store waits for one that hangs while opening",
        "store/process/store_process.py",
        'elif worker is not None:\n            worker.end("it was still opening")',
        "elif worker is not None:\n            pass",
        "tests/store/process/test_store_process.py",
    ),
    Bug(
        "a copy's event is not recorded behind what compute has enqueued",
        "transfer/cuda/lane.py",
        "        computed.record(torch.cuda.current_stream(self._device))\n",
        "",
        "tests/transfer/test_ordering.py",
    ),
    Bug(
        "a lane's stream does not wait for compute",
        "transfer/cuda/lane.py",
        "                    stream.wait_event(computed)\n",
        "",
        "tests/transfer/test_ordering.py",
    ),
    Bug(
        "a lane hands a transfer back while its stream still copies",
        "transfer/cuda/lane.py",
        "                        stream.synchronize()\n",
        "",
        "tests/transfer/test_lane.py",
    ),
    Bug(
        "a lane copies on compute's stream and not on its own",
        "transfer/cuda/lane.py",
        "with torch.cuda.device(self._device), torch.cuda.stream(stream):",
        "with torch.cuda.device(self._device):",
        "tests/transfer/test_lane.py",
    ),
    Bug(
        "nothing says when a lane began to wait for compute",
        "transfer/cuda/lane.py",
        "asked = stream.record_event(_timed_event())",
        "asked = _timed_event()",
        "tests/transfer/test_lane.py",
    ),
    Bug(
        "nothing says when a lane's wait for compute ended",
        "transfer/cuda/lane.py",
        "released = stream.record_event(_timed_event())",
        "released = asked",
        "tests/transfer/test_lane.py",
    ),
    Bug(
        "a loop of copies down returns before they have landed",
        "transfer/cuda/copies.py",
        "self._ends.host[target : target + num_blocks].copy_(blocks, non_blocking=True)\n"
        "        _wait_landed(self._ends.device.device)\n",
        "self._ends.host[target : target + num_blocks].copy_(blocks, non_blocking=True)\n",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "a loop of copies up returns before they have landed",
        "transfer/cuda/copies.py",
        "self._ends.device[target : target + num_blocks].copy_(blocks, non_blocking=True)\n"
        "        _wait_landed(self._ends.device.device)\n",
        "self._ends.device[target : target + num_blocks].copy_(blocks, non_blocking=True)\n",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "a loop of copies of layers returns before they have landed",
        "transfer/cuda/copies.py",
        "self._ends.device[target, part].copy_(self._ends.host[source, part], non_blocking=True)\n"
        "        _wait_landed(self._ends.device.device)\n",
        "self._ends.device[target, part].copy_(self._ends.host[source, part], non_blocking=True)\n",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "a batch of copies down returns before it has landed",
        "transfer/cuda/copies.py",
        "self._submit(below, above, sizes, SourceOrder.STREAM)\n        _wait_landed(self._ends.device.device)\n",
        "self._submit(below, above, sizes, SourceOrder.STREAM)\n",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "a batch of copies up returns before it has landed",
        "transfer/cuda/copies.py",
        "self._submit(above, below, sizes, SourceOrder.ANY)\n        _wait_landed(self._ends.device.device)\n",
        "self._submit(above, below, sizes, SourceOrder.ANY)\n",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "a batch of copies of layers returns before it has landed",
        "transfer/cuda/copies.py",
        "self._submit(above, below, [part.stop - part.start] * len(host), SourceOrder.ANY)\n"
        "        _wait_landed(self._ends.device.device)\n",
        "self._submit(above, below, [part.stop - part.start] * len(host), SourceOrder.ANY)\n",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "what waits until a copy has landed does not wait",
        "transfer/cuda/copies.py",
        "torch.cuda.current_stream(device).synchronize()",
        "pass",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "a batch may read blocks that kernels are still writing",
        "transfer/cuda/copies.py",
        "self._submit(below, above, sizes, SourceOrder.STREAM)",
        "self._submit(below, above, sizes, SourceOrder.ANY)",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "a batch beside the default stream does not wait for it",
        "transfer/cuda/copies.py",
        "        beside.wait_stream(stream)  # the call refuses the legacy default stream: run "
        "next to it, in its order\n",
        "",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "the default stream does not wait for the batch beside it",
        "transfer/cuda/copies.py",
        "        stream.wait_stream(beside)\n",
        "",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "a staging buffer is filled anew while it is being copied up",
        "transfer/cuda/copies.py",
        "                staging.wait()  # for what it was used for two parts ago\n",
        "",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "a staging buffer is unpacked before the copy down has landed",
        "transfer/cuda/copies.py",
        "    staging.wait()\n    host.numpy()[slots]",
        "    host.numpy()[slots]",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "staging buffers are given back with copies under way",
        "transfer/cuda/copies.py",
        "            _wait_landed(self._device.device)\n            self._unused.put(stagings)",
        "            self._unused.put(stagings)",
        "tests/transfer/cuda/test_staging.py",
    ),
    Bug(
        "nothing marks the end of a copy to a staging buffer",
        "transfer/cuda/copies.py",
        "        self.host[: len(slots)].copy_(part, non_blocking=True)\n        self._mark()\n",
        "        self.host[: len(slots)].copy_(part, non_blocking=True)\n",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "nothing marks the end of a copy from a staging buffer",
        "transfer/cuda/copies.py",
        "        blocks.index_copy_(0, index, part)\n        self._mark()\n",
        "        blocks.index_copy_(0, index, part)\n",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "the mark of a staging buffer is never recorded",
        "transfer/cuda/copies.py",
        "            self._used.record(torch.cuda.current_stream(self.device.device))",
        "            pass",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "a staging buffer is never waited for",
        "transfer/cuda/copies.py",
        "            self._used.synchronize()",
        "            pass",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "ways to copy are tried before their memory has been filled",
        "transfer/cuda/copy_choice.py",
        "        stream.wait_stream(torch.cuda.current_stream(device))\n",
        "",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "a copy kernel's launch is not waited for",
        "transfer/cuda/kernel.py",
        "        stream.synchronize()\n",
        "",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "a copy kernel runs on another stream than the lane's",
        "transfer/cuda/kernel.py",
        "with self._cupy.cuda.Device(device.index), self._cupy.cuda.ExternalStream(stream.cuda_stream):",
        "with self._cupy.cuda.Device(device.index):",
        "tests/transfer/test_ordering.py",
    ),
    Bug(
        "slots are copied as pinned ones before they are",
        "transfer/cuda/memory.py",
        "return host < self._slab.num_pinned_slots",
        "return host >= 0",
        "tests/transfer/cuda/test_pinned_slots.py",
    ),
    Bug(
        "a kernel is tried on memory that is not pinned",
        "transfer/cuda/memory.py",
        "ways_to(slab.num_pinned_slots == num_blocks)",
        "ways_to(True)",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "what was pinned is not unpinned",
        "transfer/cuda/pinning.py",
        "            cudart.cudaHostUnregister(address)",
        "            pass",
        "tests/transfer/test_block_memory.py",
    ),
    Bug(
        "a slot counts as pinned before it is",
        "transfer/host_slab.py",
        "                if self._pin is not None:\n"
        "                    self._unpins.append(self._pin(base + start, length))\n"
        "                self.prepared_bytes = start + length\n",
        "                self.prepared_bytes = start + length\n"
        "                if self._pin is not None:\n"
        "                    self._unpins.append(self._pin(base + start, length))\n",
        "tests/transfer/test_host_slab.py",
    ),
    Bug(
        "the gate of a layer opens before its copies",
        "tiers/up/layered_upload.py",
        "            for part in range(self.gate.num_parts):\n",
        "            for part in range(self.gate.num_parts):\n                self.gate.open_next()\n",
        "tests/tiers/up/test_layered_upload.py",
    ),
    Bug(
        "a copy goes over the end of a registration",
        "transfer/block_runs.py",
        " | (host[1:] % slots_per_piece == 0)",
        "",
        "tests/transfer/cuda/test_pinned_slots.py",
    ),
    Bug(
        "a pin that may not be made longer ends",
        "engine/documents/pins.py",
        "        if pin is None and must_have_room:\n            return False\n",
        "",
        "tests/engine/documents/test_document_pins.py",
    ),
    Bug(
        "a request that waits for slots is looked up in every step",
        "engine/scheduling/scheduler.py",
        "if last_hit is not None and not self._has_slots(request, last_hit)",
        "if False and not self._has_slots(request, last_hit)",
        "tests/engine/scheduling/test_scheduler.py",
    ),
    Bug(
        "memory that is short is taken for a model that cannot be used",
        "engine/model/short_memory.py",
        "if isinstance(error, MemoryError) or not _SHORT.search(str(error)):",
        "if isinstance(error, MemoryError) or error:",
        "tests/engine/model/test_short_memory.py",
    ),
    Bug(
        "pins are kept although their time is over",
        "engine/scheduling/timed_pins.py",
        "while self._by_end and now >= self._by_end[0][0]",
        "while self._by_end and now > self._by_end[0][0]",
        "tests/engine/scheduling/test_timed_pins.py",
    ),
    Bug(
        "ends of pins that ended before their time pile up",
        "engine/scheduling/timed_pins.py",
        "if len(self._by_end) >= 2 * len(self._owners) + _MOST_STALE:",
        "if False:",
        "tests/engine/scheduling/test_timed_pins.py",
    ),
    Bug(
        "after a reset owners of pins may pin no more",
        "engine/core.py",
        "self.pins.unpin_all()",
        "pass",
        "tests/engine/documents/test_kept_prompts.py",
    ),
    Bug(
        "a server that is loading tells clients nothing of when to come again",
        "engine/server/loading_app.py",
        'code="loading", headers=headers)',
        'code="loading")',
        "tests/engine/server/test_loading_app.py",
    ),
    Bug(
        "keys that were replaced while the model was loading do not share",
        "engine/server/http_server.py",
        "app.share_among(self.entrance.num_tenants)  # the keys",
        "pass  # the keys",
        "tests/engine/server/test_serve_limits.py",
    ),
    Bug(
        "chunks are promised to an engine without looking at their digest",
        "engine/sidecar/lmcache/promises.py",
        "digests[number] == known[i])",
        "True)",
        "tests/engine/sidecar/lmcache/test_door.py",
    ),
    Bug(
        "a chunk that a worker copies is given away when its request ends",
        "engine/sidecar/lmcache/promises.py",
        "            needed[reading.chunks.start : reading.chunks.stop] = True\n",
        "            pass\n",
        "tests/engine/sidecar/lmcache/test_door.py",
    ),
    Bug(
        "a chunk that is being verified is given away",
        "engine/sidecar/lmcache/promises.py",
        "        needed |= self._is_being_verified\n",
        "",
        "tests/engine/sidecar/lmcache/test_door.py",
    ),
    Bug(
        "a hit is as long as the first rank's",
        "engine/sidecar/lmcache/promises.py",
        "        end = min((own.end for own in promise.chunks), default=0)\n",
        "        end = promise.chunks[0].end if promise.chunks else 0\n",
        "tests/engine/sidecar/lmcache/test_door.py",
    ),
    Bug(
        "a lookup does not wait for what was just committed",
        "engine/sidecar/lmcache/promises.py",
        "        if num_there < len(names) and self._clock()",
        "        if num_there < 0 and self._clock()",
        "tests/engine/sidecar/lmcache/test_door.py",
    ),
    Bug(
        "a promise of a dead connection is kept",
        "engine/sidecar/lmcache/door.py",
        "        self._promises.end_client(client)\n",
        "",
        "tests/engine/sidecar/lmcache/test_door.py",
    ),
    Bug(
        "a reservation of a dead worker is kept",
        "engine/sidecar/lmcache/door.py",
        "            self._stores.end_instance(instance)\n",
        "",
        "tests/engine/sidecar/lmcache/test_door.py",
    ),
    Bug(
        "a worker that is stopped loses the slots it writes to",
        "engine/sidecar/lmcache/registrations.py",
        "min(now - self.heard_at, MOST_GAP_S)",
        "now - self.heard_at",
        "tests/engine/sidecar/lmcache/test_door.py",
    ),
    Bug(
        "chunks can be found before their digests are taken",
        "engine/sidecar/lmcache/stores.py",
        "        if store.num_taken < len(store.slots):\n            return\n",
        "",
        "tests/engine/sidecar/lmcache/test_door.py",
    ),
    Bug(
        "what was committed before a clear is found after it",
        "engine/sidecar/lmcache/stores.py",
        "            store.is_void |= store.tiers.layout in layouts\n",
        "            pass\n",
        "tests/engine/sidecar/lmcache/test_door.py",
    ),
    Bug(
        "pickled chunks are taken",
        "engine/sidecar/lmcache/door.py",
        "        if data:\n",
        "        if not instance_id:\n",
        "tests/engine/sidecar/lmcache/test_door.py",
    ),
    Bug(
        "engines with two layouts of one model have hits",
        "engine/sidecar/lmcache/registrations.py",
        "        if len(found) > 1:\n",
        "        if len(found) > 2:\n",
        "tests/engine/sidecar/lmcache/test_door.py",
    ),
    Bug(
        "an unknown worker is never told to register",
        "engine/sidecar/lmcache/registrations.py",
        "            self._pinged.popitem(last=False)\n        return False",
        "            self._pinged.popitem(last=False)\n        return True",
        "tests/engine/sidecar/lmcache/test_door.py",
    ),
    Bug(
        "tokens that begin otherwise have the last message's names",
        "engine/sidecar/lmcache/token_keys.py",
        "    return one.startswith(other) or other.startswith(one)",
        "    return True",
        "tests/engine/sidecar/lmcache/test_token_keys.py",
    ),
    Bug(
        "a salt does not matter while the request is known",
        "engine/sidecar/lmcache/token_keys.py",
        "named is None or named.salt != salt or",
        "named is None or",
        "tests/engine/sidecar/lmcache/test_token_keys.py",
    ),
    Bug(
        "what a message's header promises is waited for",
        "engine/sidecar/lmcache/zmtp.py",
        "        if self._num_frame_bytes + num_bytes > MOST_MESSAGE_BYTES:",
        "        if self._num_frame_bytes > MOST_MESSAGE_BYTES:",
        "tests/engine/sidecar/lmcache/test_port.py",
    ),
    Bug(
        "a client that reads nothing is answered on",
        "engine/sidecar/port.py",
        "        return len(self.unread) <= MOST_UNREAD_BYTES",
        "        return len(self.unread) <= 1000 * MOST_UNREAD_BYTES",
        "tests/engine/sidecar/lmcache/test_port.py",
    ),
    Bug(
        "an engine may publish into slots that it has not reserved",
        "engine/sidecar/own/session.py",
        "        if (self._states[group_id][slots] == FREE).any() or len",
        "        if len",
        "tests/engine/sidecar/own/test_own_door.py",
    ),
    Bug(
        "an engine may give a slot back twice in one message",
        "engine/sidecar/own/session.py",
        ' or len(np.unique(slots)) < len(slots):\n            raise Malformed("a slot that',
        ':\n            raise Malformed("a slot that',
        "tests/engine/sidecar/own/test_own_door.py",
    ),
    Bug(
        "an engine's reserved slots outlive its connection",
        "engine/sidecar/own/session.py",
        "                self._lower.abandon(group_id, slots)\n\n    def check",
        "\n    def check",
        "tests/engine/sidecar/own/test_own_door.py",
    ),
    Bug(
        "an engine's fetches outlive its connection",
        "engine/sidecar/own/session.py",
        "            fetched.fetch.release(np.arange(len(fetched.is_open))[::-1])",
        "            pass",
        "tests/engine/sidecar/own/test_own_door.py",
    ),
    Bug(
        "what was reserved before all was cleared can be found",
        "engine/sidecar/own/session.py",
        "states[states == RESERVED] = VOID",
        "states[states == RESERVED] = RESERVED",
        "tests/engine/sidecar/own/test_own_door.py",
    ),
    Bug(
        "a fetch may name a block twice",
        "engine/sidecar/own/session.py",
        "        if len(set(names)) < len(names):",
        "        if len(set(names)) > len(names):",
        "tests/engine/sidecar/own/test_own_door.py",
    ),
    Bug(
        "a block that waits for a slot is waited for without an end",
        "engine/sidecar/own/session.py",
        "            fetched.failed += [(place, Reason.CAPACITY) for place in places.tolist()]",
        "            places = places[:0]",
        "tests/engine/sidecar/own/test_own_door.py",
    ),
    Bug(
        "chains of a publication may overlap",
        "engine/sidecar/own/session.py",
        "        if each.start != end or not end",
        "        if not end",
        "tests/engine/sidecar/own/test_own_door.py",
    ),
    Bug(
        "an engine that attaches is told of the first page of host memory alone",
        "engine/sidecar/own/feed.py",
        "                    start = int(slots[-1]) + 1\n                names",
        "                    start = host.pool.num_slots\n                names",
        "tests/engine/sidecar/own/test_feed.py",
    ),
    Bug(
        "an engine is told pages that it does not read",
        "engine/sidecar/own/feed.py",
        "return client.is_open and len(client.unread) < MOST_UNREAD_BYTES",
        "return client.is_open",
        "tests/engine/sidecar/own/test_feed.py",
    ),
    Bug(
        "changes are kept from an engine until it has been told of all there was",
        "engine/sidecar/own/feed.py",
        "        if self._clients:\n            for frame",
        "        if all(pages is None for pages in self._clients.values()):\n            for frame",
        "tests/engine/sidecar/own/test_feed.py",
    ),
    Bug(
        "names on disk are paged through downwards while buckets are split",
        "tiers/lower/name_set.py",
        "        while start < self.num_buckets:",
        "        for start in reversed(range(0, self.num_buckets, num_buckets)):",
        "tests/tiers/lower/test_name_set.py",
    ),
    Bug(
        "a page has names that have left the set",
        "tiers/lower/name_set.py",
        "yield [name for name in over[start : start + num_buckets] if name in self._over]",
        "yield over[start : start + num_buckets]",
        "tests/tiers/lower/test_name_set.py",
    ),
    Bug(
        "what was on disk when all was forgotten is not told of",
        "tiers/lower/local_tiers.py",
        "        self.index.disk.index.empty()\n",
        "        self.index.disk.index.clear()\n",
        "tests/engine/sidecar/own/test_own_door.py",
    ),
    Bug(
        "an engine is told that all was cleared before it was told of each block",
        "engine/sidecar/own/door.py",
        "            if feed.tiers.tiers.is_forgetting:",
        "            if False:",
        "tests/engine/sidecar/own/test_own_door.py",
    ),
    Bug(
        "an engine may attach twice at one connection",
        "engine/sidecar/own/door.py",
        "                if found is not None:\n                    raise",
        "                if False:\n                    raise",
        "tests/engine/sidecar/own/test_own_door.py",
    ),
    Bug(
        "slots across the end of an extent are given",
        "engine/sidecar/own/block_slots.py",
        "        first = -(-extent * self._extent_bytes // self.block_bytes)",
        "        first = extent * self._extent_bytes // self.block_bytes",
        "tests/engine/sidecar/own/test_own_door.py",
    ),
    Bug(
        "a client that has too much to read is kept",
        "engine/sidecar/port.py",
        "        if len(client.unread) > MOST_QUEUED_BYTES:",
        "        if len(client.unread) > 1000 * MOST_QUEUED_BYTES:",
        "tests/engine/sidecar/own/test_feed.py",
    ),
    Bug(
        "everyone may connect although only this user may attach",
        "engine/sidecar/doors.py",
        "0o600 if uids == {os.geteuid()} else 0o666",
        "0o666",
        "tests/engine/sidecar/own/test_own_port.py",
    ),
    Bug(
        "the sidecar's HTTP has things done for a page in a browser",
        "engine/sidecar/http/access.py",
        'if "origin" in headers or not is_loopback(name):',
        "if not is_loopback(name):",
        "tests/engine/sidecar/test_sidecar_http.py",
    ),
    Bug(
        "questions to a stuck owner pile up",
        "engine/sidecar/sidecar.py",
        "if self.num_asked >= MOST_ASKED:",
        "if not MOST_ASKED:",
        "tests/engine/sidecar/test_sidecar_http.py",
    ),
    Bug(
        "a layout is cleared and the doors are not told",
        "engine/sidecar/sidecar.py",
        "door.on_clear(layouts)",
        "pass",
        "tests/engine/sidecar/test_sidecar_http.py",
    ),
    Bug(
        "the salts of tenants are shown to all who reach the sidecar's HTTP",
        "engine/sidecar/http/views.py",
        """view["tenants"] = [msgspec.to_builtins(tenant, enc_hook=int) for tenant in config.tenants.values()]""",
        "pass",
        "tests/engine/sidecar/test_sidecar_http.py",
    ),
    Bug(
        "a breaker that one layout has opened is closed for another's",
        "engine/sidecar/statistics.py",
        "max((disk.breakers[side] for disk in disks), key=_WORSE.index)",
        "disks[-1].breakers[side]",
        "tests/engine/sidecar/test_sidecar_statistics.py",
    ),
    Bug(
        "the watchdog is told once only",
        "engine/sidecar/systemd.py",
        "self._alive_at = now",
        'self._alive_at = float("inf")',
        "tests/engine/sidecar/test_systemd.py",
    ),
]


def first_failure(bug: Bug) -> str | None:
    """Plant the bug in a copy and run its tests; the first one that fails, or None."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bug-") as folder:
        copy = Path(folder)
        (copy / "src" / "kvtier").mkdir(parents=True)
        shutil.copy(ROOT / "kvtier" / "__init__.py", copy / "src" / "kvtier")
        for room in ROOMS:
            shutil.copytree(ROOT / room, copy / "src" / "kvtier" / room, ignore=shutil.ignore_patterns("__pycache__"))
        source = copy / "src" / "kvtier" / bug.file
        text = source.read_text()
        if text.count(bug.right) != 1:
            raise SystemExit(f"planted bugs: {bug.file} no longer has the line for {bug.what!r}; mend the list")
        source.write_text(text.replace(bug.right, bug.wrong))
        for folder_name in ("tests", "bench"):
            shutil.copytree(ROOT / folder_name, copy / folder_name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        # The copy is found before the editable install.
        program = (
            f"import sys; sys.path.insert(0, {str(copy / 'src')!r}); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
        )
        command = [
            sys.executable,
            "-c",
            program,
            "-x",
            "-q",
            "--no-header",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            bug.tests,
        ]
        # For the processes that tests start.
        environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0].removeprefix("FAILED ") if failed else None


def main() -> int:
    """Plant every bug; 0 if each was caught."""
    missed = 0
    with ThreadPoolExecutor(os.cpu_count()) as at_once:
        for bug, test in zip(BUGS, at_once.map(first_failure, BUGS), strict=True):
            missed += test is None
            print(f"{bug.what}\n    {'NOT CAUGHT' if test is None else 'caught by ' + test}", flush=True)
    print(f"{len(BUGS) - missed} of {len(BUGS)} bugs caught")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
