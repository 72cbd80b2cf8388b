"""What a page of another site can make a browser send to a server without keys, and who is let in all the same."""

import socket
from collections.abc import Iterator

import httpx
import pytest
from plain_http import NO_TLS
from serving import MODEL, ServerInThread, serving, tables
from small_models import build
from starlette.datastructures import Headers

from kvtier.web.browser_check import BrowserRules

CHAT_PAGE = "https://chat.example"


def rules(listen: str = "127.0.0.1", hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()) -> BrowserRules:
    return BrowserRules.of(listen, hosts, origins, "add it to hosts", "add it to origins")


def code(found: BrowserRules, method: str = "POST", **headers: str) -> str | None:
    """The code of the refusal; None if the request is let in. An underscore stands for a dash."""
    sent = Headers({name.replace("_", "-"): value for name, value in headers.items()})
    refusal = found.refusal(method, sent)
    return None if refusal is None else refusal.code


@pytest.fixture(scope="module")
def allowing() -> Iterator[ServerInThread]:
    """A server that a proxy and a page on another origin may use."""
    config = tables(40, allowed_hosts=["kv.example"], cors_origins=[CHAT_PAGE])
    with serving(build("llama"), config) as address:
        yield address


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8000",
        "LOCALHOST",
        "localhost.",
        "kvtier.localhost:8000",
        "127.0.0.1:8000",
        "10.244.1.7:8000",  # a probe by the address of a pod
        "[::1]:8000",
        "[2001:db8::7]",
        "[fe80::1%eth0]:8000",
        "::1",
    ],
)
@pytest.mark.parametrize("listen", ["127.0.0.1", "::1", "localhost", "0.0.0.0"])
def test_addresses_and_loopback_names_are_known_everywhere(host: str, listen: str) -> None:
    assert code(rules(listen), host=host) is None


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example", "localhost@evil.example"]
)
@pytest.mark.parametrize("listen", ["127.0.0.1", "0.0.0.0"])
def test_a_name_that_a_page_can_have_is_not_known(host: str, listen: str) -> None:
    assert code(rules(listen), host=host) == "unknown_host"


@pytest.mark.parametrize(
    "host", ["kvtier", "kvtier.default.svc:80", "kvtier.default.svc.cluster.local", "gpu.internal"]
)
def test_names_that_public_dns_cannot_have_are_known_on_a_network_alone(host: str) -> None:
    assert code(rules("0.0.0.0"), host=host) is None
    assert code(rules("::"), host=host) is None
    assert code(rules("127.0.0.1"), host=host) == "unknown_host"


def test_the_name_that_a_server_listens_on_and_the_machines_own_are_known() -> None:
    assert code(rules("gpu7.corp.example"), host="GPU7.corp.example:8000") is None
    assert code(rules("10.0.0.7"), host=f"{socket.gethostname()}:8000") is None


def test_named_hosts_are_known() -> None:
    named = rules(hosts=("kv.example", "*.corp.example"))

    assert code(named, host="kv.example") is None
    assert code(named, host="gpu7.corp.example:8000") is None
    assert code(named, host="corp.example") == "unknown_host"
    assert code(named, host="evilcorp.example") == "unknown_host"
    assert code(rules(hosts=("*",)), host="evil.example") is None


def test_clients_without_a_host_are_let_in_and_with_two_are_not() -> None:
    assert code(rules()) is None
    assert code(rules(), host="") is None
    two = Headers(raw=[(b"host", b"localhost"), (b"host", b"evil.example")])
    refusal = rules().refusal("GET", two)
    assert refusal is not None
    assert refusal.status == 400


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://localhost:3000", "http://[", "chrome-extension://a"]
)
def test_pages_of_other_origins_are_refused(origin: str) -> None:
    assert code(rules(), host="localhost:8000", origin=origin) == "unknown_origin"


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_a_browser_says_is_of_another_site_is_refused(site: str, method: str) -> None:
    assert (
        code(rules(), method, host="localhost:8000", sec_fetch_site=site, sec_fetch_mode="no-cors") == "unknown_origin"
    )


def test_a_servers_own_pages_may_ask() -> None:
    assert code(rules(), host="localhost:8000", origin="http://localhost:8000") is None
    assert code(rules(), host="LocalHost:8000", origin="http://localhost:8000") is None
    assert code(rules(), "GET", host="localhost:8000", sec_fetch_site="none", sec_fetch_mode="navigate") is None
    through_tls = {"host": "kv.example", "origin": "https://kv.example"}  # a proxy that leaves the Host
    assert code(rules(hosts=("kv.example",)), **through_tls) is None
    behind = {"host": "127.0.0.1:8000", "origin": "https://kv.example", "sec_fetch_site": "same-origin"}
    assert code(rules(), **behind) is None


def test_a_link_on_another_page_opens_the_dashboard_and_a_form_or_frame_there_does_nothing() -> None:
    link = {"host": "localhost", "sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}

    assert code(rules(), "GET", **link, sec_fetch_dest="document") is None
    assert code(rules(), "POST", **link, sec_fetch_dest="document", origin="http://evil.example") == "unknown_origin"
    assert code(rules(), "GET", **link, sec_fetch_dest="iframe") == "unknown_origin"


def test_named_origins_may_ask() -> None:
    named = rules(origins=(CHAT_PAGE, "app://notes"))

    assert code(named, host="localhost", origin=CHAT_PAGE, sec_fetch_site="cross-site") is None
    assert code(named, host="localhost", origin="app://notes") is None
    assert code(named, host="localhost", origin="https://chat.example.evil.example") == "unknown_origin"
    assert code(named, host="evil.example", origin=CHAT_PAGE) == "unknown_host"
    assert code(rules(origins=("*",)), host="localhost", origin="null") is None


@pytest.mark.parametrize(
    "headers",
    [
        {"user-agent": "curl/8.5"},
        {"user-agent": "node", "sec-fetch-mode": "cors", "accept-language": "*"},  # fetch of Node.js
        {"user-agent": "Prometheus/3.5", "accept": "application/openmetrics-text"},
        {"x-forwarded-host": "kv.example", "x-forwarded-for": "203.0.113.9"},
    ],
)
def test_clients_that_are_no_browsers_are_let_in(server: ServerInThread, headers: dict[str, str]) -> None:
    assert server.get("/v1/models", headers=headers).status_code == 200


def test_a_page_can_neither_generate_nor_learn_nor_delete(server: ServerInThread) -> None:
    body = f'{{"model": "{MODEL}", "prompt": "hello", "max_tokens": 1}}'
    evil = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    rebound = {"Host": f"evil.example:{server.port}", "Origin": f"http://evil.example:{server.port}"}
    asked = [
        ("POST", "/v1/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/kvtier/documents/x/pin"),
        ("DELETE", "/v1/kvtier/documents/x"),
        ("GET", "/v1/kvtier/documents"),
        ("GET", "/v1/kvtier/stats"),
        ("GET", "/metrics"),
        ("GET", "/dashboard"),
        ("GET", "/dashboard/history"),
    ]

    def status(method: str, path: str, headers: dict[str, str]) -> int:
        answer = httpx.request(method, server.url + path, content=body, headers=headers, timeout=60, verify=NO_TLS)
        return answer.status_code

    for method, path in asked:
        for headers in (evil, rebound):
            assert status(method, path, headers) == 403, (method, path, headers)


def test_an_error_names_the_option(server: ServerInThread) -> None:
    unknown = server.get("/v1/models", headers={"Host": "kv.example"}).json()["error"]
    foreign = server.get("/v1/models", headers={"Origin": "https://chat.example"}).json()["error"]

    assert unknown["code"] == "unknown_host"
    assert "'kv.example'" in unknown["message"]
    assert "--allow-host" in unknown["message"]
    assert "server.allowed_hosts" in unknown["message"]
    assert "https://chat.example" in foreign["message"]
    assert "server.cors_origins" in foreign["message"]
    assert "\n" not in unknown["message"] + foreign["message"]


def test_probes_are_answered_under_any_name(server: ServerInThread) -> None:
    for path in ("/health", "/ready", "/version"):
        assert server.get(path, headers={"Host": "gpu7.corp.example"}).status_code == 200


def test_a_named_proxy_and_a_named_page_may_ask(allowing: ServerInThread) -> None:
    by_proxy = allowing.get("/v1/models", headers={"Host": "kv.example"})
    dashboard = allowing.get("/dashboard/history", headers={"Host": "kv.example", "Origin": "https://kv.example"})
    by_page = allowing.get("/v1/models", headers={"Origin": CHAT_PAGE, "Sec-Fetch-Site": "cross-site"})
    asked = {"origin": CHAT_PAGE, "access-control-request-method": "POST"}
    before = httpx.options(f"{allowing.url}/v1/completions", headers=asked, verify=NO_TLS)

    assert [by_proxy.status_code, dashboard.status_code, by_page.status_code, before.status_code] == [200] * 4
    assert by_page.headers["access-control-allow-origin"] == CHAT_PAGE
    assert allowing.get("/v1/models", headers={"Origin": "https://evil.example"}).status_code == 403


def test_with_keys_clients_ask_by_any_name_and_from_anywhere() -> None:
    headers = {"Authorization": "Bearer sk-ann-1111", "Host": "kv.example", "Origin": "app://notes"}
    with serving(build("llama"), tables(40), {"sk-ann-1111": "ann"}) as address:
        assert address.get("/v1/models", headers=headers).status_code == 200
