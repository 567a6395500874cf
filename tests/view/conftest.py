"""One browser for all tests of the explorer page. Without a Chromium these tests are skipped.

The browser has no window and is driven by its DevTools protocol: https://chromedevtools.github.io/devtools-protocol.
For .ci/install, on Debian: apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
from websocket import create_connection

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT = 60  # seconds, for every wait
FLAGS = ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run")
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "Escape": 27}


def find_browser():
    """Return the path of the browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. `events` are the events that the browser has sent."""

    def __init__(self, width=1280, height=860):
        self.folder = Path(tempfile.mkdtemp(prefix="sightline-browser-"))
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        command = [find_browser(), *FLAGS, *sandbox, "--remote-debugging-port=0", "--remote-allow-origins=*"]
        self.process = subprocess.Popen(
            [*command, f"--user-data-dir={self.folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.call_id, self.events = 0, []
        port = self.until(self._port)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as pages:
            address = next(page for page in json.load(pages) if page["type"] == "page")["webSocketDebuggerUrl"]
        self.socket = create_connection(address, timeout=TIMEOUT)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def _port(self):
        try:
            return (self.folder / "DevToolsActivePort").read_text().split()[0]
        except (OSError, IndexError):
            return None

    @staticmethod
    def until(condition):
        """Call `condition` until its result is true, and return the result."""
        end = time.monotonic() + TIMEOUT
        while not (value := condition()):
            assert time.monotonic() < end, "the browser did not reach the condition in time"
            time.sleep(0.02)
        return value

    def call(self, method, **parameters):
        self.call_id += 1
        self.socket.send(json.dumps({"id": self.call_id, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.call_id:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, **features):
        pairs = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=pairs)

    def open(self, path):
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.until(lambda: self.js("document.readyState === 'complete' && location.protocol === 'file:'"))
        self.frame()

    def js(self, expression):
        """Return the value of an expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def frame(self):
        """Wait until the requested changes are drawn."""
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def middle(self, element):
        """Return the middle of the element that an expression gives, in screen coordinates."""
        return self.js(
            f"(({{ x, y, width: w, height: h }}) => [x + w / 2, y + h / 2])({element}.getBoundingClientRect())"
        )

    def mouse(self, x, y, click=False):
        at = {"x": x, "y": y}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)
        self.frame()

    def drag(self, start, end, steps=10):
        (x0, y0), (x1, y1) = start, end
        button = {"button": "left", "buttons": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=x0, y=y0, clickCount=1, **button)
        for step in range(1, steps + 1):
            share = step / steps
            x, y = x0 + (x1 - x0) * share, y0 + (y1 - y0) * share
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, **button)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=x1, y=y1, clickCount=1, **button)
        self.frame()

    def key(self, name, shift=False):
        code = KEYS.get(name)
        more = {"windowsVirtualKeyCode": code} if code else {"text": name}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, modifiers=8 if shift else 0, **more)
        self.frame()

    def type(self, text):
        self.call("Input.insertText", text=text)
        self.frame()

    def complaints(self):
        """Return the events of the console, and the URLs of all requests except that of the page itself."""
        self.js("0")
        console = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        requests = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        urls = [parameters["request"]["url"] for parameters in requests[1:]]
        return [event for event in self.events if event["method"] in console] + [url for url in urls if url != "data:,"]

    def close(self):
        self.socket.close()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def chromium():
    if find_browser() is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    opened = Browser()
    yield opened
    opened.close()
