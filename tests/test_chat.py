"""``anaphora chat``, as a script would use it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def chat(text: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "anaphora.cli", "chat", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=120, env=environment
    )


def turns(output: str) -> list[tuple[int, int, int]]:
    """Tokens of each turn's prompt: all, read, computed."""
    found = re.findall(r"prompt ([\d,]+) tokens: ([\d,]+) read, ([\d,]+) computed", output)
    return [(int(a.replace(",", "")), int(b), int(c)) for a, b, c in found]


def test_every_turn_says_what_it_read_and_computed(tiny_llama: Path, tmp_path: Path) -> None:
    arguments = (tiny_llama, "--cache-dir", tmp_path, "--max-tokens", 8, "--temperature", 0)
    done = chat("Hello there\n\nAnd again\n", *arguments, "--threads", 1)
    assert done.returncode == 0, done.stderr
    (first, read, computed), (second, reread, recomputed) = turns(done.stdout)
    assert (read, computed) == (0, first), "an empty line is no turn"
    assert second > first
    assert reread >= first
    assert recomputed <= second - first
    assert "\x1b[" not in done.stdout
    again = chat("Hello there\n", *arguments, "--threads", 1)
    assert turns(again.stdout) == [(first, first, 1)], "and after a restart"


def test_a_long_answer_is_shown_to_its_end(tiny_llama: Path, tmp_path: Path) -> None:
    arguments = (tiny_llama, "--cache-dir", tmp_path, "--max-tokens", 1500, "--temperature", 1)
    done = chat("Hello there\n", *arguments)
    assert done.returncode == 0
    assert "anaphora:" not in done.stderr
    assert len(turns(done.stdout)) == 1


def test_clear_begins_a_new_conversation(tiny_llama: Path, tmp_path: Path) -> None:
    arguments = ("--cache-dir", tmp_path, "--max-tokens", 4, "--system", "Be brief.")
    done = chat("Hello\n/clear\nHello\n", tiny_llama, *arguments)
    (first, _, _), (second, read, _) = turns(done.stdout)
    assert first == second == read


def test_a_turn_that_does_not_fit_is_one_line_and_the_chat_goes_on(
    tiny_llama: Path, tmp_path: Path
) -> None:
    arguments = ("--cache-dir", tmp_path, "--max-tokens", 4, "--ctx-size", 128)
    done = chat("long " * 200 + "\nshort\n", tiny_llama, *arguments)
    assert done.returncode == 0, done.stderr
    assert "context holds 128" in done.stderr
    assert len(turns(done.stdout)) == 1


def test_options_may_come_from_a_file(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "anaphora.toml"
    file.write_text(f'model = "{tiny_llama}"\nctx-size = 128\ncache-dir = "{tmp_path}"\n')
    done = chat("Hello\n", "--config", file, "--max-tokens", 2)
    assert done.returncode == 0, done.stderr
    assert "128 tokens of context" in done.stderr
    file.write_text("ctx-sizes = 128")
    failed = chat("Hello\n", "--config", file)
    assert failed.returncode == 1
    assert "did you mean ctx-size?" in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1
