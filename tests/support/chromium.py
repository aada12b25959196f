"""Chromium without a window, driven over a pipe by its DevTools protocol: JSON messages that end with a zero byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")


class Browser:
    """One tab. `problems` are the errors and warnings of its console."""

    def __init__(self, to: IO[bytes], back: IO[bytes]) -> None:
        self._to, self._back = to, back
        self._buffer, self._count, self._session = b"", 0, ""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def open(self, file: Path, width: int = 1280, height: int = 900, scheme: str = "light", fragment: str = "") -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=file.as_uri() + fragment)
        while True:
            message = self._read()
            self._note(message)
            if message.get("method") == "Page.loadEventFired":
                return

    def run(self, script: str) -> Any:
        """What the body of an async function returns."""
        expression = f"(async () => {{{script}}})()"
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._back.fileno(), 1 << 16)
            assert part, "the browser ended"
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        read: dict[str, Any] = json.loads(message)
        return read

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.problems.append(str(parameters["args"]))
            case "Log.entryAdded":
                self.problems.append(parameters["entry"]["text"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A running browser, whose settings are in the folder `profile`."""
    assert CHROMIUM is not None
    (reads, to), (back, writes) = os.pipe(), os.pipe()
    command = f'exec "$0" "$@" 3<&{reads} 4>&{writes}'  # the protocol wants these numbers
    process = subprocess.Popen(
        ["bash", "-c", command, CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}"],
        pass_fds=(reads, writes),
        stderr=subprocess.DEVNULL,
    )
    os.close(reads)
    os.close(writes)
    try:
        with os.fdopen(to, "wb") as sink, os.fdopen(back, "rb") as source:
            yield Browser(sink, source)
    finally:
        process.terminate()
        process.wait(20)
