"""Real processes on one cache folder: killed while writing, side by side, out of disk space."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anaphora.errors import CacheBusyError
from tests.cache.support import BLOCK_SIZE, check_consistent, open_cache, prompt, read

WRITE_FOREVER = """
import sys
from pathlib import Path
from tests.cache.support import compute, open_cache, prompt
cache = open_cache(Path(sys.argv[1]), memory=8)
print("ready", flush=True)
for number in range(1_000_000):
    compute(cache, prompt(1, number, number + 1))
    cache.maintain(0.01)
    print(number, flush=True)
"""

HOLD = """
import sys, time
from pathlib import Path
from tests.cache.support import compute, open_cache, prompt
cache = open_cache(Path(sys.argv[1]))
compute(cache, prompt(1, 2))
cache.flush()
print("ready", flush=True)
time.sleep(60)
"""

WRITE_WITHOUT_SPACE = """
import resource, sys
from pathlib import Path
from anaphora.clock import SystemClock
from tests.cache.support import compute, open_cache, prompt, read
cache = open_cache(Path(sys.argv[1]), clock=SystemClock())
compute(cache, prompt(1))
cache.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
compute(cache, prompt(2, 3))
cache.flush()
assert read(cache, prompt(1)) == 16
assert read(cache, prompt(2, 3)) == 32
print(cache.stats().write_failures, cache.unwritten)
cache.close()
"""


def start(script: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.011])
def test_a_process_killed_while_writing_loses_only_what_was_not_written(
    tmp_path: Path, delay: float
) -> None:
    for _ in range(2):
        process = start(WRITE_FOREVER, tmp_path)
        try:
            assert next_line(process) == "ready"
            done = -1
            while done < 20:
                done = int(next_line(process))
            time.sleep(delay)
        finally:
            process.send_signal(signal.SIGKILL)
            rest = process.communicate()[0].split()
        done = max([done, *map(int, rest)])
        cache = open_cache(tmp_path)
        for number in range(done - 1):
            tokens = prompt(1, number, number + 1)
            assert read(cache, tokens) == cache.read_tokens(tokens) == 3 * BLOCK_SIZE
        assert cache.stats().misses.damaged == 0
        assert not list(tmp_path.glob("**/*.tmp"))
        check_consistent(cache)
        cache.close()


def test_a_second_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    process = start(HOLD, tmp_path)
    try:
        assert next_line(process) == "ready"
        with pytest.raises(CacheBusyError, match=f"process {process.pid} "):
            open_cache(tmp_path)
    finally:
        process.kill()
        process.communicate()
    cache = open_cache(tmp_path)
    assert read(cache, prompt(1, 2)) == 32
    check_consistent(cache)


def test_a_full_disk_keeps_serving(tmp_path: Path) -> None:
    process = start(WRITE_WITHOUT_SPACE, tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    failures, unwritten = map(int, output.split())
    assert failures >= 1
    assert unwritten == 10_000
    cache = open_cache(tmp_path)
    assert read(cache, prompt(1)) == 16
    assert read(cache, prompt(2, 3)) == 0
    check_consistent(cache)
