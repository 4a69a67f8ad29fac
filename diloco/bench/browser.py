"""Drive a real browser over its DevTools pipe: no port, no package, one headless Chromium for a block's time."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from diloco.errors import DeviceError

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WHY_SKIPPED = "NO CHROMIUM HERE: pages were NOT opened in a browser (apt-get install chromium)"
LAPTOP, PHONE = (1280, 800, 1.0, False), (390, 844, 2.0, True)
OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--mute-audio",
    "--force-color-profile=srgb", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip


class Browser:
    """Send commands to a Chromium and hear its events; one tab."""

    def __init__(self, folder: Path) -> None:
        assert BROWSER is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def prepare() -> None:  # the browser reads commands from 3 and writes to 4
            low, high = os.dup2(to_read, 100), os.dup2(to_write, 101)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            [BROWSER, *OPTIONS, f"--user-data-dir={folder}", "about:blank"], preexec_fn=prepare, close_fds=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._number, self._answers = 0, dict[int, Queue[dict[str, Any]]]()
        self.events: list[dict[str, Any]] = []
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        rest = b""
        while chunk := os.read(self._read, 1 << 20):
            *messages, rest = (rest + chunk).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                else:
                    self.events.append(message)

    def ask(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Give a command, and return its result."""
        self._number += 1
        answer = self._answers[self._number] = Queue()
        message = {"id": self._number, "method": method, "params": params}
        raw = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while raw:
            raw = raw[os.write(self._write, raw) :]
        try:
            said = answer.get(timeout=120)
        except Empty:
            raise TimeoutError(f"the browser does not answer {method}") from None
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']}")
        return said["result"]

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(20)
        os.close(self._write)


class Tab:
    """One page of a browser: what it shows, asks for and complains about."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        self._target = target
        self._session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Give a command about this page, and return its result."""
        return self._browser.ask(method, self._session, **params)

    def look_like(self, device: tuple[int, int, float, bool], *, dark: bool = False) -> None:
        """Show the page as on a device, by day or by night."""
        width, height, scale, mobile = device
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        """Open an address, and wait until it is loaded."""
        self.ask("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return what a script evaluates to; raise what it throws."""
        said = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise RuntimeError(said["exceptionDetails"]["exception"].get("description", said))
        return said["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 120.0) -> Any:
        """Wait until a script is true; the limit ends a test that hangs, it is no claim about speed."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.run(condition)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {condition}\n{self.run('document.body.innerText')[:3000]}")
            time.sleep(0.1)
        return found

    def text(self, selector: str = "body") -> str:
        """Return what a person reads there."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        """Click on the middle of an element, by the mouse."""
        box = self._within(selector, 0.5)
        self.mouse("mousePressed", *box, button="left", clickCount=1)
        self.mouse("mouseReleased", *box, button="left", clickCount=1)

    def hover(self, selector: str, share: float) -> None:
        """Point at an element, this share of its width from the left."""
        self.mouse("mouseMoved", *self._within(selector, share))

    def drag(self, selector: str, begin: float, end: float) -> None:
        """Drag over an element, from one share of its width to another."""
        (left, y), (right, _) = self._within(selector, begin), self._within(selector, end)
        self.mouse("mousePressed", left, y, button="left", clickCount=1)
        self.mouse("mouseMoved", right, y, button="left", buttons=1)
        self.mouse("mouseReleased", right, y, button="left", clickCount=1)

    def _within(self, selector: str, share: float) -> list[float]:
        return self.run(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); "
            "one.scrollIntoView({block: 'center'}); const box = one.getBoundingClientRect(); "
            f"return [box.x + {share} * box.width, box.y + Math.min(box.height / 2, 200)]; }})()"
        )

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move or press the mouse."""
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def picture(self, *, whole: bool = True) -> bytes:
        """Return a PNG of the page."""
        size = self.run("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
        clip = {"clip": {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}} if whole else {}
        return base64.b64decode(
            self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip)["data"]
        )

    def _events(self, method: str) -> list[dict[str, Any]]:
        events = list(self._browser.events)
        return [
            each["params"] for each in events if each["method"] == method and each.get("sessionId") == self._session
        ]

    @property
    def complaints(self) -> list[str]:
        """Return errors and warnings of the console, exceptions, and what the content policy refused."""
        said = [
            " ".join(str(each.get("value", each.get("description", ""))) for each in call["args"])
            for call in self._events("Runtime.consoleAPICalled")
            if call["type"] in ("error", "warning", "assert")
        ]
        thrown = [str(each["exceptionDetails"]) for each in self._events("Runtime.exceptionThrown")]
        logged = [
            f"{each['entry']['text']} {each['entry'].get('url', '')}" for each in self._events("Log.entryAdded")
            if each["entry"]["level"] in ("error", "warning")
        ]  # fmt: skip
        return [*said, *thrown, *logged]

    @property
    def requests(self) -> list[str]:
        """Return the addresses that the page has asked for."""
        return [each["request"]["url"] for each in self._events("Network.requestWillBeSent")]

    def close(self) -> None:
        """Close the page."""
        self._browser.ask("Target.closeTarget", targetId=self._target)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Run a browser with a fresh profile; raise DeviceError where none is installed."""
    if BROWSER is None:
        raise DeviceError("no Chromium is installed here: apt-get install chromium, or any Chrome on the PATH")
    with tempfile.TemporaryDirectory(prefix="diloco-browser-", ignore_cleanup_errors=True) as folder:
        browser = Browser(Path(folder))
        try:
            yield browser
        finally:
            browser.close()
