"""The self-test passes on what is sound and notices what is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from anaphora import selftest
from anaphora.engine.llamacpp.context import LlamaContext
from anaphora.selftest import Report
from anaphora.settings import Settings
from tests.conftest import TinyModel
from tests.test_cli import run


def report_of(path: Path, folder: Path) -> Report:
    return selftest.run(path, folder, Settings(threads=1), lambda _: None)


def test_it_passes_and_every_hit_came_from_where_it_should(
    tiny_llama: Path, tmp_path: Path
) -> None:
    report = report_of(tiny_llama, tmp_path)
    assert report.passed
    assert [(check.mode, check.source) for check in report.checks] == [
        (mode, source) for mode in ("default", "exact") for source in ("cells", "memory", "disk")
    ]
    assert all(check.reused_tokens >= 1472 for check in report.checks)
    assert [check.difference for check in report.checks if check.must_equal] == [0.0] * 3
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_bytes_restored_wrongly_are_noticed(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = LlamaContext.restore

    def wrong(
        self: LlamaContext, seq: int, state: object, start: int, end: int, block_end: int
    ) -> bool:
        data = np.frombuffer(state, dtype=np.uint8).copy()  # type: ignore[call-overload]
        if start == 256:
            data[len(data) // 2 :] = data[len(data) // 2 : len(data) // 2 + 1]
        return restore(self, seq, memoryview(data), start, end, block_end)

    monkeypatch.setattr(LlamaContext, "restore", wrong)
    report = report_of(tiny_llama, tmp_path)
    passed = {(check.mode, check.source): check.passed for check in report.checks}
    assert not report.passed
    assert passed["exact", "cells"]
    assert not passed["exact", "memory"]
    assert not passed["exact", "disk"]


def test_a_cache_that_finds_nothing_does_not_pass(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaContext, "restore", lambda *_: False)
    report = report_of(tiny_llama, tmp_path)
    assert {c.source for c in report.checks if not c.passed} == {"memory", "disk"}


def test_the_command_says_so_by_its_exit_code(tiny_llama: Path, tmp_path: Path) -> None:
    done = run("selftest", tiny_llama, "--cache-dir", tmp_path, "--threads", 1, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert len(report["checks"]) == 6
    shown = run("selftest", tiny_llama, "--cache-dir", tmp_path, "--threads", 1)
    assert shown.stdout.count(" ok ") == 6
    assert "\x1b[" not in shown.stdout


def test_a_model_without_a_cache_has_nothing_to_check(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    done = run("selftest", tiny_model("mamba"), "--cache-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing to check" in done.stdout


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    failed = run("selftest", tmp_path / "none.gguf", "--cache-dir", tmp_path)
    assert failed.returncode == 1
    assert len(failed.stderr.strip().splitlines()) == 1
