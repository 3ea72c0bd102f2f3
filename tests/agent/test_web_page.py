"""The web page of the leader's agent: what it serves to whom, and what a browser shows of a recorded drill."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import page_kit
import pytest
from agent_kit import Job, eventually
from page_kit import TOKEN, Browser, of_size, recorded, served_page

from gemini_ft.agent import lifecycle
from gemini_ft.agent.web_page import WebPage, read_token
from gemini_ft.config import load_config
from gemini_ft.errors import ConfigError, GeminiError, SecretError
from gemini_ft.wire.worker_messages import TellSpares

pytest.importorskip("prometheus_client", reason="needs prometheus-client: pip install 'gemini-ft[metrics]'")
KEY = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Five agents of one job that serve the page; the one of host a leads, and some report to it by way of others."""
    token = token_file(tmp_path_factory.mktemp("token"), TOKEN)
    with Job(tmp_path_factory.mktemp("served")) as job:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GEMINI_METRICS", "0")
            patch.setenv("GEMINI_PAGE_TOKEN_FILE", str(token))
            ranks = job.start(*"abcde", fan_in=2)
        job.commit(ranks, 1, 2)
        yield job


def token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return path


def address_of(job: Job, host: str) -> str:
    return str(eventually(lambda: job.status(host)["metrics"], "an address of the page"))


def get(address: str, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> tuple[int, dict[str, str], str]:
    """Status, headers and text of an answer."""
    request = urllib.request.Request(f"http://{address}{path}", headers=headers or {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, dict(refused.headers), refused.read().decode()


def test_the_leaders_page_has_what_every_agent_says_of_itself(job: Job) -> None:
    address = address_of(job, "a")

    def told() -> Any:
        status, headers, text = get(address, "/status.json", KEY)
        assert (status, headers["Content-Type"]) == (200, "application/json")
        found = json.loads(text)
        return found if found["hosts"].keys() == {*"abcde"} and all(of["account"]["page"] for of in found["hosts"].values()) else None

    found = eventually(told, "the accounts of the other hosts")
    assert found["host"] == "a"
    for host in "abcde":
        own, shown = job.status(host), found["hosts"][host]["account"]
        assert 0 <= found["hosts"][host]["heard"] < 30
        assert shown["launches"] == []
        assert own.keys() == shown.keys()
        assert own["streams"]["main"].keys() - shown["streams"]["main"].keys() == {"command"}
        for name in ("run", "host", "pid", "began", "memory", "workers", "metrics"):
            assert shown[name] == own[name]
        for name in ("leader", "committed", "counters", "shards", "job"):
            assert shown["streams"]["main"][name] == own["streams"]["main"][name]
    member = json.loads(get(address_of(job, "b"), "/status.json", KEY)[2])
    assert member["hosts"].keys() == {"b"}
    assert member["hosts"]["b"]["account"]["streams"]["main"]["leader"] == "a"
    assert f"a web page is served at http://{address}/" in job.log("a")
    assert TOKEN not in job.log("a")
    lifecycle.ask(job.run, "a", TellSpares(waiting=1, lacking=2))
    figures = get(address, "/metrics")[2]
    assert f'gemini_spares{{run="{job.run}"}} 1.0' in figures
    assert f'gemini_lacking_hosts{{run="{job.run}"}} 2.0' in figures
    assert "gemini_spares{" not in get(address_of(job, "b"), "/metrics")[2]


def test_figures_are_for_whoever_has_the_token_and_nothing_is_kept(job: Job) -> None:
    address = address_of(job, "a")
    for path in ("/", "/page.css", "/page.js", "/metrics", "/status.json"):
        status, headers, text = get(address, path)
        assert status == (401 if path == "/status.json" else 200)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        kept = headers["X-Content-Type-Options"], headers["Cache-Control"], headers["Referrer-Policy"]
        assert kept == ("nosniff", "no-store", "no-referrer")
        assert "Set-Cookie" not in headers
        assert TOKEN not in text
        assert get(address, path, method="HEAD")[::2] == (status, "")
    for given in ("", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer", "Bearer \xe9" * 9):
        status, headers, text = get(address, "/status.json", {"Authorization": given})
        assert status == 401
        assert headers["WWW-Authenticate"].startswith("Bearer")
        assert "page_token_file" in text
    assert get(address, f"/status.json?token={TOKEN}")[0] == 401, "a token in an address would be kept in logs"
    for path in ("/page.html", "/../web_page.py", "/..%2fweb_page.py", "//", "/index.html"):
        assert get(address, path, KEY)[0] == 404
    assert get(address, "/status.json", KEY, method="POST")[0] == 405


def test_a_name_that_a_stranger_has_pointed_at_the_address_gets_nothing(job: Job) -> None:
    address = address_of(job, "a")
    port = address.rpartition(":")[2]
    for name, status in [("evil.example", 421), ("", 421), ("127.0.0.1.evil.example:80", 421), (f"[::1]:{port}", 200)]:
        assert get(address, "/status.json", {**KEY, "Host": name})[0] == status
        assert get(address, "/", {"Host": name})[0] == status
    for name in ("localhost", "LOCALHOST:1", socket.gethostname(), "127.0.0.1"):
        assert get(address, "/", {"Host": name})[0] == 200
    assert get(address, "/metrics", {"Host": "prometheus-knows-it-as.example"})[0] == 200


# -- without an agent


def test_a_token_that_is_none_is_named_with_the_way_out(tmp_path: Path) -> None:
    good = token_file(tmp_path, f" {TOKEN}\n")
    assert read_token(load_config({})) is None
    assert read_token(load_config({"metrics": 1, "page_token_file": good})) == TOKEN
    with pytest.raises(ConfigError, match="GEMINI_METRICS=9464"):
        read_token(load_config({"page_token_file": good}))
    wrong: list[tuple[Path, type[GeminiError], str]] = [
        (tmp_path / "missing", SecretError, "openssl rand"),
        (token_file(tmp_path, TOKEN, 0o640), SecretError, "chmod 600"),
    ]
    for path, kind, text in wrong:
        with pytest.raises(kind, match=text):
            read_token(load_config({"metrics": 1, "page_token_file": path}))
    for text in ("", "short", f"{TOKEN} and more", f"{TOKEN}\xe9"):
        with pytest.raises(ConfigError, match="one word of at least 16 ASCII characters"):
            read_token(load_config({"metrics": 1, "page_token_file": token_file(tmp_path, text)}))


async def document_of(page: WebPage, now: float) -> Any:
    answer = await page.answer("/status.json", {"host": "h", "authorization": f"Bearer {TOKEN}"}, now)
    assert answer is not None
    return json.loads(answer.body, parse_constant=pytest.fail)


def test_a_host_that_says_nonsense_of_itself_costs_its_own_row() -> None:
    asked = [0]

    def accounts() -> dict[str, Any]:
        asked[0] += 1
        nonsense = ["", "{", "[" * 10**5, '{"a": NaN, "b": 1e999, "c": [-Infinity, 2.5]}', "1" * 5000, '1, "x": 2', '"\\ud800"']
        nonsense += ["[" * deep + "]" * deep for deep in range(900, 1000)]  # around Python's own limit
        return {"hosts": {str(number): {"heard": 1.0, "account": text} for number, text in enumerate(nonsense)}}

    async def work() -> None:
        page = WebPage(TOKEN, "h", accounts)
        found = [of["account"] for of in (await document_of(page, 5.0))["hosts"].values()]
        assert found == [None, None, None, {"a": None, "b": None, "c": [None, 2.5]}, None, None, "\ud800", *[None] * 100]
        await document_of(page, 5.9)
        assert asked == [1], "hosts are asked at most once a second, however many look"
        await document_of(page, 6.1)
        assert asked == [2]

    asyncio.run(work())


def test_the_document_of_a_large_job_is_written_once_for_all_and_not_by_the_agents_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, threads, reads = [0], set[int](), json.loads

    def accounts() -> dict[str, Any]:
        asked[0] += 1
        if asked == [1]:
            raise ValueError("not now")
        return {
            "run": 'a "run"',
            "hosts": {f"h{number}": {"heard": 1.0, "account": json.dumps({"host": number})} for number in range(1000)},
        }

    def loads(*given: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        return reads(*given, **options)

    async def work() -> None:
        page = WebPage(TOKEN, "h", accounts)
        with pytest.raises(ValueError, match="not now"):
            await document_of(page, 5.0)
        headers = {"host": "h", "authorization": f"Bearer {TOKEN}"}
        monkeypatch.setattr(json, "loads", loads)
        readers = [asyncio.create_task(page.answer("/status.json", headers, 5.0)) for _ in range(3)]
        await asyncio.sleep(0)
        readers[0].cancel()  # it hangs up meanwhile, and the others get theirs
        answers = await asyncio.gather(*readers[1:])
        monkeypatch.undo()
        assert asked == [2]
        assert threads
        assert threading.get_ident() not in threads
        for answer in answers:
            assert answer is not None
            found = json.loads(answer.body)
            assert found.keys() == {"run", "version", "hosts"}
            assert found["run"] == 'a "run"'
            assert found["hosts"]["h999"] == {"heard": 1.0, "account": {"host": 999}}
            assert len(found["hosts"]) == 1000

    asyncio.run(work())


# -- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


in_browser = pytest.mark.skipif(page_kit.CHROMIUM is None, reason="needs chromium: apt-get install chromium")
TEXTS = "[...document.querySelectorAll('#hosts tr')].map(line => [...line.children].map(cell => cell.textContent))"
RED = '<img src="http://evil.example/x" onerror="document.title=1">'


@in_browser
def test_it_is_used_without_a_mouse_and_keeps_no_token(browser: Browser, tmp_path: Path) -> None:
    *_, replaced = recorded()
    with served_page(lambda: replaced, tmp_path) as address:
        browser.events.clear()
        browser.look(f"http://{address}/")
        browser.wait_for("document.activeElement.id === 'token'")
        for text, told in (("not the token", "This is not the token."), (TOKEN, "All hosts answer.")):
            browser.tell("Input.insertText", text=text)
            browser.press("Enter", 13, "\r")
            browser.wait_for(f"document.getElementById('state').textContent === {told!r}")
        assert browser.run("document.activeElement.id") == "main"
        assert browser.run("getComputedStyle(document.getElementById('door')).display") == "none"
        reached = []
        for _ in range(7):
            browser.press("Tab", 9)
            reached.append(browser.run("document.activeElement.textContent.trim().split('\\n')[0]"))
        assert reached[:4] == ["Hosts", "Last failures", "Time", "Idle spans"]
        assert reached[5] == "The longest spans as a list"
        assert TOKEN not in browser.run("document.documentElement.outerHTML + location.href")
        assert not browser.run("document.cookie + Object.keys(localStorage) + Object.keys(sessionStorage)")
        asked = [event["params"]["request"]["url"] for event in browser.events if event["method"] == "Network.requestWillBeSent"]
        assert asked
        assert all(url.startswith((f"http://{address}/", "data:,", "about:")) for url in asked)
        wrong = [event["params"] for event in browser.events if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
        assert [entry["entry"]["text"] for entry in wrong if "401" not in str(entry)] == []


@in_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_it_shows_the_figures_of_every_host_on_any_screen(browser: Browser, tmp_path: Path, width: int) -> None:
    at_work, hung, lost, _, replaced = recorded()
    for number, job in enumerate([of_size(at_work, 1), hung, lost, replaced, of_size(lost, 64)]):
        with served_page(partial(dict, job), tmp_path) as address:
            browser.look(f"http://{address}/#token={TOKEN}", width=width, dark=number % 2 == 1)
            hosts = job["hosts"]
            rows = browser.wait_for(f"(rows => rows.length === {len(hosts)} && rows)({TEXTS})")
            assert browser.run("location.hash") == ""
            assert browser.run("document.documentElement.scrollWidth") <= width
            by_host = {row[0].partition(",")[0]: row for row in rows}
            assert by_host.keys() == hosts.keys()
            for host, row in by_host.items():
                of = hosts[host]["account"]["streams"]["main"]
                assert row[3] == str(of["measures"]["step"])
                assert row[4] == f"{1 / of['measures']['step_seconds']:.2f}"
                assert row[5] == str(of["committed"])
                assert row[11] == str(of["counters"]["uploads"])
            if job is lost:
                assert rows[0][0].startswith("host2, away for ")
                lacking = next(of["account"]["spares"]["lacking"] for of in hosts.values() if not of["heard"])
                assert f"hosts lacking{lacking}" in browser.run("document.getElementById('job').textContent")
            tree = browser.tell("Accessibility.getFullAXTree")["nodes"]
            named = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]}
            assert {("heading", "Last failures"), ("table", "Hosts"), ("combobox", "Host"), ("rowheader", rows[0][0])} <= named
            assert {("columnheader", "committed"), ("cell", rows[0][5])} <= named
            pictures = [name for role, name in named if role in ("image", "img")]
            assert any(name.startswith("Time of main: training ") for name in pictures)
            assert any(name.startswith("Time lost: detection ") for name in pictures) == (job is not at_work and len(hosts) > 1)


@in_browser
def test_a_failure_is_of_the_hosts_whose_workers_failed_and_not_of_those_that_heard_of_it(browser: Browser, tmp_path: Path) -> None:
    at_work, *_ = recorded()
    job = copy.deepcopy(at_work)
    failure = {"at": job["at"] - 60, "step": 7, "resumed": 6, "count": 1, "seconds": {}}
    known, unknown = failure | {"incarnation": 1, "cause": "hang", "host": "gone"}, failure | {"incarnation": 2, "cause": "", "host": ""}
    for of in job["hosts"].values():
        of["account"]["streams"]["main"]["measures"]["run"]["failures"] = [known, unknown]
    with served_page(lambda: job, tmp_path) as address:
        browser.look(f"http://{address}/#token={TOKEN}", width=1280)
        browser.wait_for(f"(rows => rows.length === {len(job['hosts'])} && rows)({TEXTS})")
        told = browser.run("[...document.querySelectorAll('#failures li p:first-of-type')].map(each => each.textContent)")
    assert {text.partition(":")[0] for text in told} == {"main, seen by host gone", "main"}


@in_browser
def test_what_hosts_say_is_text_and_what_is_missing_is_no_end(browser: Browser, tmp_path: Path) -> None:
    *_, replaced = recorded()
    evil = copy.deepcopy(replaced)
    evil["run"] = RED
    of_evil = evil["hosts"][RED] = evil["hosts"].pop("host1")
    of_evil["account"]["streams"] = {RED: of_evil["account"]["streams"]["main"] | {"hang": {"text": RED}, "leader": RED}}
    evil["hosts"]["host3"]["account"] = {"streams": {"main": {"measures": {"run": {"failures": [{}]}}, "traffic": {"idle_spans": [[]]}}}}
    evil["hosts"]["host4"] = {"heard": 0, "account": None}
    with served_page(lambda: evil, tmp_path) as address:
        browser.look(f"http://{address}/#token={TOKEN}")
        rows = browser.wait_for(f"(rows => rows.length === 4 && rows)({TEXTS})")
        assert {RED, "host0", "host3", "host4"} == {row[0] for row in rows}
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert browser.run("document.getElementById('run').textContent") == RED
        assert browser.run("document.getElementById('time').textContent").count("was training") == 2


@in_browser
def test_the_pictures_of_the_docs_are_those_of_today(browser: Browser, tmp_path: Path) -> None:
    """Drawn by scripts/page_picture. The picture of the page is as high as the page; fonts differ between machines."""
    docs, (*_, replaced) = Path(__file__).parents[2] / "docs", recorded()
    assert texts_of(page_kit.terminal(replaced)) == texts_of((docs / "top.svg").read_text())
    with served_page(lambda: replaced, tmp_path) as address:
        browser.look(f"http://{address}/#token={TOKEN}", width=1280)
        browser.wait_for(f"(rows => rows.length === {len(replaced['hosts'])} && rows)({TEXTS})")
        browser.picture(tmp_path / "page.png")
    now, then = (struct.unpack(">II", (folder / "page.png").read_bytes()[16:24]) for folder in (tmp_path, docs))
    assert now == pytest.approx(then, rel=0.02)


def texts_of(picture: str) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)</text>", picture)
