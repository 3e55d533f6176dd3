"""The measuring scripts in ``bench/`` still run. Their bars are for longer runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent / "bench"


def test_load_finds_nothing_wrong_with_the_server(tmp_path: Path) -> None:
    options = ["--cache-dir", tmp_path, "--connections", 12, "--requests", 48, "--json"]
    command = [sys.executable, BENCH / "load.py", *options]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240)
    assert run.stdout, run.stderr
    report = json.loads(run.stdout)
    values = {row["name"]: row["values"][-1] for row in report["rows"]}
    assert values["answered"] + values["left by their clients"] == 48
    assert values["broken off"] == 0, report["notes"]
    assert values["faults found at rest"] == 0, report["notes"]
