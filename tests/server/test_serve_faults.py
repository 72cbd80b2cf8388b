"""`kvtier serve` on a failing disk: clients get right answers, the log one line."""

import shutil
from pathlib import Path

import pytest
from served_config import configured
from serving import come_true, serving_process

PROMPTS = [f"{word} quick brown fox jumps over the lazy dog. " * 4 for word in ("The", "One", "Any")]


def texts(done: list[dict]) -> list[str]:
    return [answer["choices"][0]["text"] for answer in done]


@pytest.mark.long
def test_a_folder_removed_under_a_server_costs_a_line_and_no_answer(tmp_path: Path, model_folder: Path) -> None:
    store = tmp_path / "store"
    with serving_process(tmp_path, model_folder, configured(tmp_path)) as server:
        before = texts([server.complete(prompt, max_tokens=4) for prompt in PROMPTS])
        shutil.rmtree(store)
        come_true(lambda: "kvtier_disk_folder_gone_total 1.0" in server.get("/metrics").text)
        come_true(lambda: "kvtier_disk_open 1.0" in server.get("/metrics").text)
        after = texts([server.complete(prompt, max_tokens=4) for prompt in PROMPTS])
        server.signal()
        status = server.wait()
        warnings = [line["message"] for line in server.lines() if line["level"] == "warning"]

    assert (status, after) == (0, before)
    assert warnings == [
        f"disk: {store} was removed or replaced while it was open; its blocks are lost, and it is reopened"
    ]
    assert (store / "data.mdb").exists()


@pytest.mark.long
def test_a_server_whose_store_cannot_be_opened_serves_without_it(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "store").write_text("no folder")

    with serving_process(tmp_path, model_folder, configured(tmp_path)) as server:
        done = server.complete(PROMPTS[0], max_tokens=4)
        again = server.complete(PROMPTS[0], max_tokens=4)
        metrics = server.get("/metrics").text
        server.signal()
        status = server.wait()
        opening, flush = [line["message"] for line in server.lines() if line["level"] == "warning"]

    assert (status, texts([again])) == (0, texts([done]))
    assert again["kvtier"]["tokens"]["device"] > 0
    assert "kvtier_disk_open 0.0" in metrics
    assert 'kvtier_disk_not_open{reason="failed"} 1.0' in metrics
    assert opening.startswith(f"disk: {tmp_path / 'store'} is not open ([Errno 20] is not a folder")
    assert flush.startswith("flush: ")
