"""The web page of agents, served from a recorded drill of three hosts, and a browser without a window that looks at it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rich.console import Console

from gemini_ft.agent.figures import samples
from gemini_ft.agent.metrics_page import MetricsPage
from gemini_ft.cli.top import screen

TOKEN = "a-token-of-some-length"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
Job = dict[str, Any]  # what `/status.json` has


def recorded() -> list[Job]:
    """A drill of three hosts and a spare: at work, after a hang, as a host has been lost, without it, and with the spare in its place."""
    return list(json.loads(Path(__file__).with_name("recorded_drill.json").read_text()))


def of_size(job: Job, hosts: int) -> Job:
    """The same moment of a job with more hosts, or one."""
    found, kept = copy.deepcopy(job), list(job["hosts"].values())
    found["hosts"] = {}
    for number in range(hosts):
        account = copy.deepcopy(kept[0 if not number else 1 + (number - 1) % (len(kept) - 1)])
        account["account"] |= {"host": f"host{number}", "workers": {str(8 * number + rank): 1000 + rank for rank in range(8)}}
        found["hosts"][f"host{number}"] = account
    found["hosts"]["host0"]["account"]["streams"]["main"]["job"] |= {"hosts": hosts, "ranks": 8 * hosts}
    return found


def terminal(job: Job) -> str:
    """A picture of what ``gemini top`` shows of a moment."""
    answers = {f"{job['run']}/{host}": list(samples(of["account"])) for host, of in job["hosts"].items()}
    console = Console(record=True, width=185, file=io.StringIO())
    console.print(screen(answers, job["at"]))
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="gemini top", unique_id="top"), flags=re.DOTALL)  # from elsewhere


@contextlib.contextmanager
def served_page(job: Callable[[], Job], folder: Path) -> Iterator[str]:
    """Serves the page as an agent does; gives its address."""
    (token := folder / "token").write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    before = {name: os.environ.get(name) for name in ("GEMINI_METRICS", "GEMINI_PAGE_TOKEN_FILE")}
    os.environ |= {"GEMINI_METRICS": "0", "GEMINI_PAGE_TOKEN_FILE": str(token)}
    run = SimpleNamespace(metrics="", has_page=False, log=lambda text: None)
    loop = asyncio.new_event_loop()

    def account() -> Job:
        now = job()
        return {**now, "hosts": {host: {**of, "account": json.dumps(of["account"])} for host, of in now["hosts"].items()}}

    async def serve() -> MetricsPage:
        return MetricsPage(cast("Any", run), dict, account)

    async def finish(page: MetricsPage) -> None:
        page.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()  # one for each connection that the browser keeps
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.05)

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    page = asyncio.run_coroutine_threadsafe(serve(), loop).result(30)
    try:
        end = time.monotonic() + 30
        while not run.metrics:
            assert time.monotonic() < end
            time.sleep(0.01)
        yield run.metrics
    finally:
        asyncio.run_coroutine_threadsafe(finish(page), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class Browser:
    """Chromium without a window, driven by the DevTools protocol over a pipe."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, self._say = os.pipe()
        self._hear, ours = os.pipe()
        options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe --hide-scrollbars"
        command = f'exec "$0" {options} --user-data-dir="$1" about:blank 3<&{theirs} 4>&{ours}'
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(["bash", "-c", command, CHROMIUM, self._folder.name], pass_fds=(theirs, ours), **quiet)  # type: ignore[call-overload]
        os.close(theirs)
        os.close(ours)
        self._numbers, self._rest, self._session = itertools.count(1), b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.tell(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._say)
        os.close(self._hear)
        self._folder.cleanup()

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        """Carries out a command; events that come meanwhile are kept in ``events``."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        os.write(self._say, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                more = os.read(self._hear, 2**16)
                assert more, "the browser has ended"
                self._rest += more
            text, _, self._rest = self._rest.partition(b"\0")
            heard = json.loads(text)
            if heard.get("id") == number:
                assert "error" not in heard, (method, heard["error"])
                return dict(heard["result"])
            self.events.append(heard)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.tell("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + 30
        while not (found := self.run(script)):
            assert time.monotonic() < end, script
            time.sleep(0.05)
        return found

    def look(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a page in a window of this size."""
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])
        self.tell("Page.navigate", url="about:blank")
        self.tell("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Presses a key."""
        for kind in ("keyDown", "keyUp"):
            self.tell("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **({"text": text} if text else {}))

    def picture(self, path: Path) -> None:
        """Writes what the page looks like from its top to its end."""
        data = self.tell("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
