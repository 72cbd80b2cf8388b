"""What becomes of leases, and of other engines, when engines are killed a hundred times in the middle of a copy?"""

import statistics
import time
from pathlib import Path
from typing import Any

import httpx
from foreign.running import LmcacheClients, Sidecar, free_endpoint, free_port

from bench.report import Effort, Row
from bench.rounds import at_most, never
from bench.sidecar.crowd import percentile

BYSTANDER = 0
ALONE_S = 4.0
GONE_WITHIN_S = 30.0  # else it is not waited for any longer
DOCUMENT_CHUNKS = 16
HOW = ("stop_in_store", "stop_in_load", "go_on_forever")
BUSY_S = 0.1  # that a client stores and loads before it is killed anywhere


def killed_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """LMCache's own clients, killed by SIGKILL: with half of a store's chunks written, with half of a load's chunks
    read, and anywhere between; beside one that stores, loads and compares."""
    num_killed = effort.of(100, quick=3)
    freed_s: list[float] = []
    num_leased = 0
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    sidecar = Sidecar(free_endpoint(), "--host", "2GiB", http_port=port)
    with sidecar, LmcacheClients(python, sidecar.endpoint) as clients, httpx.Client(base_url=url, timeout=60) as http:
        clients.start(BYSTANDER)
        alone = clients.ask(BYSTANDER, "mixed", ALONE_S)
        clients.tell(BYSTANDER, "mixed_until_told")
        for number in range(1, num_killed + 1):
            how = HOW[number % len(HOW)]
            clients.start(number)
            if how == "go_on_forever":
                clients.tell(number, how)
                time.sleep(BUSY_S)
            else:
                clients.ask(number, how)
                num_leased += sum(lease["num_chunks"] for lease in leases_of(http, number))
            clients.kill(number)
            freed_s.append(seconds_until_free(http, number))
        clients.tell(BYSTANDER, "stop")
        beside = clients.answer(BYSTANDER)
        left = sum(lease["num_chunks"] for lease in http.get("/v1/kvtier/leases").json()["leases"])
        is_good = http.post("/v1/kvtier/check").status_code == 200
        again = clients.ask(BYSTANDER, "read_all")
        killed_in_store = [number for number in range(1, num_killed + 1) if HOW[number % len(HOW)] == "stop_in_store"]
        num_found = sum(clients.ask(BYSTANDER, "find", number, 0) for number in killed_in_store)
    minimum = DOCUMENT_CHUNKS * sum(HOW[number % len(HOW)] != "go_on_forever" for number in range(1, num_killed + 1))
    num_bad = sum(beside[what] + alone[what] for what in ("num_wrong", "num_refused"))
    name = f"{num_killed} engines killed"
    return [
        Row(f"{name}: chunks that they had leased", num_leased, "", f">= {minimum}", num_leased >= minimum),
        at_most(f"{name}: until their leases are gone, longest", max(freed_s), "s", 1),
        Row(f"{name}: until their leases are gone, median", 1e3 * statistics.median(freed_s), "ms"),
        never(f"{name}: leases left", left),
        never(f"{name}: chunks found that were never committed", num_found),
        never(f"{name}: another's loads that were wrong, stores refused", num_bad),
        Row(f"{name}: another's lookups beside them, p99", 1e3 * percentile(beside["lookup_s"], 99), "ms"),
        Row(f"{name}: another's lookups alone, p99", 1e3 * percentile(alone["lookup_s"], 99), "ms"),
        Row(
            f"{name}: books agree, and all verifies",
            is_good and not again["num_wrong"],
            "",
            "1",
            is_good and not again["num_wrong"] and not again["num_missed"],
        ),
    ]


def leases_of(http: httpx.Client, number: int) -> list[dict[str, Any]]:
    """What the sidecar keeps for a client."""
    return [lease for lease in http.get("/v1/kvtier/leases").json()["leases"] if lease["client"] == name_of(number)]


def seconds_until_free(http: httpx.Client, number: int) -> float:
    """Until the client is gone, and what was kept for it."""
    began_at = time.monotonic()
    while any(client["name"] == name_of(number) for client in http.get("/v1/kvtier/clients").json()["clients"]):
        if time.monotonic() - began_at > GONE_WITHIN_S:
            break
    assert not leases_of(http, number)
    return time.monotonic() - began_at


def name_of(number: int) -> str:
    """What the sidecar calls the client: it registers with one more than its number."""
    return f"worker {number + 1:x}"
