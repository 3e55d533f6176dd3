from __future__ import annotations

import logging
from pathlib import Path

import pytest
from llama_cpp import llama_cpp

from anaphora.engine.llamacpp import logs


def load_nonsense(tmp_path: Path) -> None:
    path = tmp_path / "nonsense.gguf"
    path.write_bytes(b"GGUF is not what this is")
    parameters = llama_cpp.llama_model_default_params()
    assert not llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)


def test_failed_load_says_why(tmp_path: Path) -> None:
    with logs.errors() as errors:
        load_nonsense(tmp_path)
    assert any("failed to load model" in line for line in errors)
    assert all("\n" not in line for line in errors)


def test_errors_end_with_their_context(tmp_path: Path) -> None:
    with logs.errors() as errors:
        pass
    load_nonsense(tmp_path)
    assert errors == []


def test_nothing_is_printed_unless_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs.route()
    load_nonsense(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_lines_reach_python_logging(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs.route()
    with caplog.at_level(logging.DEBUG, logger="anaphora.llamacpp"):
        load_nonsense(tmp_path)
    assert {record.name for record in caplog.records} == {"anaphora.llamacpp"}
    assert logging.ERROR in {record.levelno for record in caplog.records}
