"""A headless Chromium that has no network, over the pipe of its DevTools protocol.

Nothing but Chromium is needed: it is told what to do on file descriptor 3 and answers on 4, JSON
objects with a zero byte after each.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_SECONDS = 60
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-quic", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-extensions", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip


def chromium() -> str | None:
    """The browser's program; None where there is none."""
    named = os.environ.get("BERT_JAX_CHROMIUM")
    return named or next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one browser.

    Args:
        profile: An empty directory.
    """

    def __init__(self, profile: Path) -> None:
        program = chromium()
        assert program is not None
        read, answers = os.pipe()
        commands, write = os.pipe()
        # Not below 10, so that neither is 3 or 4 already.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
        redirect = f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in (commands, answers, *ends):
            os.close(end)
        self._read, self._write = read, write
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        pages = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in pages if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Network.emulateNetworkConditions", offline=True, latency=0,
                  downloadThroughput=0, uploadThroughput=0)  # fmt: skip

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What the browser answers to a command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], _SECONDS)
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Loads a file; `events` are those since then."""
        self.resize(width, height)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])
        self.events.clear()
        self.send("Page.navigate", url=page.absolute().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def resize(self, width: int, height: int) -> None:
        """Sets the window."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, by way of JSON."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True,
                          awaitPromise=True)  # fmt: skip
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def hover(self, selector: str, x: float = 0.5, y: float = 0.5, *, click: bool = False) -> None:
        """Moves the mouse onto an element, to these shares of its width and height."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        left, top, width, height = self.run(
            f"(box => [box.left, box.top, box.width, box.height])"
            f"({element}.getBoundingClientRect())"
        )
        place = {"x": left + x * width, "y": top + y * height}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **place)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1,
                          **place)  # fmt: skip

    def press(self, *keys: str) -> None:
        """Presses keys by their DOM names, such as ArrowDown."""
        for key in keys:
            text = {"text": "\r"} if key == "Enter" else {}
            for kind in ("keyDown", "keyUp"):
                self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                          windowsVirtualKeyCode=_KEY_CODES[key], **text)  # fmt: skip

    def picture(self, path: Path) -> None:
        """What is in the window, as a PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def complaints(self) -> list[dict[str, Any]]:
        """Errors and warnings of the page, and what it asked of anything but a file."""
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        return [event for event in self.events if _is_complaint(event)]

    def close(self) -> None:
        """Ends the browser with all its processes."""
        os.close(self._write)
        os.close(self._read)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


_KEY_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37,
              "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}  # fmt: skip


def _is_complaint(event: dict[str, Any]) -> bool:
    if event["method"] == "Network.requestWillBeSent":
        return not event["params"]["request"]["url"].startswith("file://")
    return event["method"] in (
        "Runtime.exceptionThrown",
        "Runtime.consoleAPICalled",
        "Log.entryAdded",
    )
