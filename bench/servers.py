"""Servers as processes of their own, for as long as a measurement needs them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Self

import psutil

_START_SECONDS = 120
_REST_SECONDS = 1.25
"""Longer than Anaphora waits before it writes to disk."""
_LONGEST_REST = 120

# A measurement that is terminated ends its servers, as one that is interrupted does.
signal.signal(signal.SIGTERM, signal.default_int_handler)


class Server:
    """A server on a port of its own; made when it takes requests.

    Raises ``RuntimeError`` with the end of its log where it doesn't start.
    """

    def __init__(self, name: str, command: Sequence[object], log: Path) -> None:
        """``command`` is completed by ``--port``; what it prints is added to the file ``log``."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.name = name
        self._log = log
        began = time.perf_counter()
        with log.open("a") as file:
            words = [str(word) for word in (*command, "--port", self.port)]
            self._process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
        while not self._ready():
            if self._process.poll() is not None or time.perf_counter() - began > _START_SECONDS:
                self.stop()
                lines = log.read_text(errors="replace").splitlines()[-20:]
                raise RuntimeError("\n".join([f"{name} did not start:", *lines]))
            time.sleep(0.02)
        self.start_seconds = time.perf_counter() - began

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def processes(self) -> list[psutil.Process]:
        """The server's process and its children."""
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def stop(self) -> None:
        """End it properly, so that it stores what it has to."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ready(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
        except (OSError, HTTPException):  # nobody listens, or not yet in earnest
            return False
        return True


def serve(model: Path, cache_dir: Path, log: Path, *options: object) -> Server:
    """``anaphora serve`` from the Python that runs this."""
    command = (sys.executable, "-m", "anaphora.cli", "serve", model, "--cache-dir", cache_dir)
    keys = ("--keys-file", cache_dir / "keys.json")  # whoever measures may have keys of their own
    return Server("anaphora", (*command, *keys, *options), log)


def rest(*processes: psutil.Process) -> None:
    """Wait until none of the processes has computed anything for a while.

    Raises ``RuntimeError`` where they never come to rest.
    """
    deadline = time.monotonic() + _LONGEST_REST
    before, quiet_since = _used(processes), time.monotonic()
    while (now := time.monotonic()) - quiet_since < _REST_SECONDS:
        if now > deadline:
            raise RuntimeError(f"a process still computed after {_LONGEST_REST} s without requests")
        time.sleep(0.05)
        if (used := _used(processes)) - before > 0.02:
            before, quiet_since = used, time.monotonic()


def _used(processes: Sequence[psutil.Process]) -> float:
    """Seconds of CPU."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)
