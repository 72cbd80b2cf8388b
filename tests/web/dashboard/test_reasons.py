"""The page that explains why tokens were computed: every reason is there, and the servers serve it without a key."""

import re

from serving import serving, tables
from sidecars import TOKEN, running_sidecar, small_config
from small_models import build

from kvtier.tiers.naming.tier import Reason
from kvtier.web.dashboard.assets import REASONS
from kvtier.web.dashboard.reasons import REASON_TEXTS, reasons_page


def test_each_reason_has_an_anchor_a_meaning_and_what_to_do() -> None:
    page = reasons_page().decode()

    assert re.findall(r'<section class="card" id="(\w+)"', page) == [reason.value for reason in Reason]
    assert set(REASON_TEXTS) == set(Reason)
    assert all(text.meaning.endswith(".") and text.do.endswith(".") for text in REASON_TEXTS.values())


def test_a_server_serves_the_page_without_a_key_and_without_scripts_of_others() -> None:
    with serving(build("llama"), tables(), {"sk-ann-1111": "ann"}) as server:
        answer = server.get(REASONS)
        again = server.get(REASONS, headers={"If-None-Match": answer.headers["etag"]})

    assert (answer.status_code, answer.content) == (200, reasons_page())
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert (again.status_code, again.content) == (304, b"")


def test_a_sidecar_serves_the_page_without_its_token() -> None:
    with running_sidecar(small_config(http={"port": 0, "token": TOKEN})) as running:
        assert running.get(REASONS).content == reasons_page()
