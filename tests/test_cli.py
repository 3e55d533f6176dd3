"""The command line, run as people run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anaphora import GREEDY, Model, __version__
from anaphora.config import FIELDS, spelled
from anaphora.scratch import scratch_folder

COMMAND = (sys.executable, "-m", "anaphora.cli")


def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "120", **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.fixture(scope="module")
def filled(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds something for two ways to compute one model."""
    folder = tmp_path_factory.mktemp("filled")
    for kv_type in ("f32", "f16"):
        with Model.load(tiny_llama, cache_dir=folder, kv_type=kv_type) as model:
            model.generate("A prompt that is cached. " * 40, max_tokens=2, sampling=GREEDY)
    return folder


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == f"anaphora {__version__}"
    shown = run("--help").stdout
    for command in (
        "serve",
        "chat",
        "selftest",
        "keys",
        "usage",
        "explain",
        "demo",
        "bench",
        "cache",
    ):
        assert command in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serve", "--prot", "80"), "No such option: --prot"),
        (("serve", "a.gguf", "b.gguf"), "unexpected extra argument"),
        (("serve", "--port"), "--port"),
        (("chat", "--max-tokens", "0"), "--max-tokens"),
        (("bench", "--repeats", "many"), "--repeats"),
        (("keys", "add"), "Missing argument"),
        (("usage", "--by", "hour"), "Invalid value for '--by': 'hour' is not one of"),
        (("cache", "list"), "No such command 'list'"),
        (("--colour",), "No such option: --colour"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_that_names_the_help(arguments: tuple[str, ...], says: str) -> None:
    failed = run(*arguments)
    assert failed.returncode == 2
    (line,) = failed.stderr.splitlines()
    assert line.startswith("anaphora: ")
    assert says in line
    assert line.endswith("--help')")
    assert failed.stdout == ""


@pytest.mark.parametrize("arguments", [(), ("keys",), ("cache",)], ids=str)
def test_a_command_without_its_part_shows_its_help(arguments: tuple[str, ...]) -> None:
    shown = run(*arguments)
    assert shown.returncode == 2
    assert "Commands" in shown.stdout
    assert shown.stderr == ""


@pytest.fixture
def script() -> Path:
    """The command as it is installed."""
    return Path(sys.executable).with_name("anaphora")


def completed(script: Path, shell: str, line: str) -> str:
    """What the command offers to a shell for the end of ``line``."""
    words = line.split(" ")
    env = {"_ANAPHORA_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}
    env |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    env |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(
        [script], capture_output=True, text=True, timeout=60, env={**os.environ, **env}
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_and_options_are_completed(script: Path, shell: str) -> None:
    offered = completed(script, shell, "anaphora se")
    assert "serve" in offered
    assert "selftest" in offered
    assert "cache" not in offered
    assert "verify" in completed(script, shell, "anaphora cache v")
    offered = completed(script, shell, "anaphora serve --kv")
    assert "--kv-type" in offered
    assert "--port" not in offered


def test_bash_completes_with_what_show_completion_prints(script: Path) -> None:
    code = f"""
        PATH={script.parent}:$PATH
        source <(anaphora --show-completion; true)
        COMP_WORDS=(anaphora se) COMP_CWORD=1
        _anaphora_completion anaphora
        printf '%s ' "${{COMPREPLY[@]}}"
        complete -p anaphora
    """
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[:2] == ["serve", "selftest"], done.stderr
    assert "-F _anaphora_completion anaphora" in done.stdout


def test_completion_is_installed_where_the_shell_reads_it(script: Path, tmp_path: Path) -> None:
    installed = subprocess.run(
        ["bash", "-c", f"{script} --install-completion; true"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert "bash completion installed" in installed.stdout, installed.stderr
    assert "anaphora.sh" in (tmp_path / ".bashrc").read_text()
    assert "complete_bash" in (tmp_path / ".bash_completions" / "anaphora.sh").read_text()


def test_ctrl_c_is_no_traceback(tiny_llama: Path, tmp_path: Path) -> None:
    command = [*COMMAND, "selftest", str(tiny_llama), "--cache-dir", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not list(tmp_path.glob("selftest-*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=60)
    assert process.returncode == 130
    assert shown == ""
    assert list(tmp_path.iterdir()) == []


def test_cache_ls_lists_every_namespace(filled: Path) -> None:
    listed = run("cache", "ls", "--cache-dir", filled)
    assert listed.returncode == 0
    assert listed.stdout.count("tiny") == 2
    assert "\x1b[" not in listed.stdout, "no colour when piped"
    found = json.loads(run("cache", "ls", "--cache-dir", filled, "--json").stdout)
    assert [info["blocks"] for info in found] == [4, 4]
    assert all(info["used_by"] is None for info in found)


@pytest.mark.parametrize("columns", ["60", "30"])
def test_cache_ls_shows_whole_folder_names_however_little_room(filled: Path, columns: str) -> None:
    listed = run("cache", "ls", "--cache-dir", filled, env={"COLUMNS": columns}).stdout
    for folder in filled.iterdir():
        assert folder.name in listed


def test_cache_commands_can_be_limited_to_a_model(
    filled: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    def count(model: Path) -> int:
        output = run("cache", "ls", "--cache-dir", filled, "--model", model, "--json").stdout
        return len(json.loads(output))

    assert count(tiny_llama) == 2
    assert count(tiny_adapter) == 0


def test_cache_ls_of_an_empty_folder(tmp_path: Path) -> None:
    listed = run("cache", "ls", "--cache-dir", tmp_path / "none")
    assert listed.returncode == 0
    assert "nothing is cached" in listed.stdout


def test_cache_verify_counts_and_removes_damage(tiny_llama: Path, tmp_path: Path) -> None:
    with Model.load(tiny_llama, cache_dir=tmp_path) as model:
        model.generate("A prompt that is cached. " * 40, max_tokens=2, sampling=GREEDY)
    sound = run("cache", "verify", "--cache-dir", tmp_path)
    assert (sound.returncode, "4 good, 0 damaged" in sound.stdout) == (0, True)
    victim = next(tmp_path.glob("*/blocks/*/*"))
    data = bytearray(victim.read_bytes())
    data[-100] ^= 1
    victim.write_bytes(data)
    damaged = run("cache", "verify", "--cache-dir", tmp_path)
    assert (damaged.returncode, "3 good, 1 damaged" in damaged.stdout) == (1, True)
    removed = run("cache", "verify", "--cache-dir", tmp_path, "--remove")
    assert (removed.returncode, "1 removed" in removed.stdout) == (0, True)
    assert not victim.exists()
    assert run("cache", "verify", "--cache-dir", tmp_path).returncode == 0


def test_cache_clear_refuses_what_is_in_use(tiny_llama: Path, tmp_path: Path) -> None:
    with Model.load(tiny_llama, cache_dir=tmp_path) as model:
        model.generate("A prompt that is cached. " * 40, max_tokens=2)
        refused = run("cache", "clear", "--cache-dir", tmp_path)
        assert refused.returncode == 1
        assert str(os.getpid()) in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
        shown = json.loads(run("cache", "ls", "--cache-dir", tmp_path, "--json").stdout)
        assert shown[0]["used_by"] == os.getpid()
    cleared = run("cache", "clear", "--cache-dir", tmp_path)
    assert cleared.returncode == 0
    assert "MiB freed" in cleared.stdout
    assert list(tmp_path.glob("*/blocks/*/*")) == []


def test_cache_clear_deletes_what_killed_runs_left_and_no_more(
    tiny_llama: Path, tmp_path: Path
) -> None:
    names = ("bench-x", "demo-y", "selftest-z", "demonstration", "models")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "block").write_bytes(bytes(1 << 20))
    outside = tmp_path.with_name("outside")
    outside.mkdir()
    (tmp_path / "bench-link").symlink_to(outside)
    with scratch_folder(tmp_path, "demo") as used:
        listed = run("cache", "ls", "--cache-dir", tmp_path).stdout
        assert "left by runs that were killed: bench-x, demo-y, selftest-z;" in listed
        one = run("cache", "clear", "--cache-dir", tmp_path, "--model", tiny_llama)
        assert one.stdout == "0.0 MiB freed\n"
        every = run("cache", "clear", "--cache-dir", tmp_path, "--json")
        assert json.loads(every.stdout) == {"freed_bytes": 3 << 20}
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"demonstration", "models", "bench-link", used.name}
    assert outside.is_dir()
    assert not used.exists()
    assert "left by" not in run("cache", "ls", "--cache-dir", tmp_path).stdout


def test_a_killed_run_leaves_what_clear_deletes(tiny_llama: Path, tmp_path: Path) -> None:
    command = [*COMMAND, "selftest", str(tiny_llama), "--cache-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not list(tmp_path.glob("selftest-*/*")):
            assert process.poll() is None
            time.sleep(0.01)
        assert "left by" not in run("cache", "ls", "--cache-dir", tmp_path).stdout
        process.kill()
    assert run("cache", "clear", "--cache-dir", tmp_path).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_demo_asks_three_times_and_hits_twice(tiny_llama: Path, tmp_path: Path) -> None:
    shown = run("demo", "--model", tiny_llama, "--cache-dir", tmp_path)
    assert shown.returncode == 0, shown.stderr
    for row in ("cold", "asked again", "after a restart"):
        assert row in shown.stdout
    table = shown.stdout[shown.stdout.index("first token  ") :].splitlines()
    cold, again, restarted = (
        next(line for line in table if line.strip().startswith(title))
        for title in ("cold", "asked again", "after a restart")
    )
    assert cold.split()[3] == "0"
    assert "x faster" in again
    assert "x faster" in restarted
    assert list(tmp_path.iterdir()) == [], "the demo leaves no blocks behind"


def test_demo_prints_json(tiny_llama: Path, tmp_path: Path) -> None:
    shown = run("demo", "--model", tiny_llama, "--cache-dir", tmp_path, "--json")
    cold, again, restarted = json.loads(shown.stdout)
    assert [one["title"] for one in (cold, again, restarted)] == [
        "cold",
        "asked again",
        "after a restart",
    ]
    assert cold["read_tokens"] == 0
    assert min(again["read_tokens"], restarted["read_tokens"]) > 0


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_a_model_that_is_missing_is_one_line(command: str, tmp_path: Path) -> None:
    failed = run(command, "--model", tmp_path / "none.gguf", "--cache-dir", tmp_path)
    assert failed.returncode == 1
    assert len(failed.stderr.strip().splitlines()) == 1
    assert "none.gguf" in failed.stderr


def test_a_cache_folder_that_cannot_be_one_is_one_line(tiny_llama: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for command in (("demo", "--model", tiny_llama), ("bench", "--model", tiny_llama)):
        failed = run(*command, "--cache-dir", blocked)
        assert failed.returncode == 1
        assert len(failed.stderr.strip().splitlines()) == 1, failed.stderr
        assert "--cache-dir" in failed.stderr


def test_bench_prints_every_measurement(tiny_llama: Path, tmp_path: Path) -> None:
    finished = run(
        "bench", "--model", tiny_llama, "--cache-dir", tmp_path, "--repeats", 1, "--json"
    )
    assert finished.returncode in (0, 1), finished.stderr
    first, second = json.loads(finished.stdout)
    assert {first["flash_attn"], second["flash_attn"]} == {"on", "off"}
    assert len(first["rows"]) == 8
    assert all(row["anaphora"] > 0 and row["reference"] > 0 for row in first["rows"])
    assert list(tmp_path.iterdir()) == []


def test_keys_are_shown_once_listed_and_revoked(tmp_path: Path) -> None:
    file = ("--keys-file", tmp_path / "keys.json")
    assert "this machine only" in run("keys", "ls", *file).stdout
    key = run("keys", "add", "laptop", "--tenant", "acme", *file).stdout.strip()
    other = json.loads(run("keys", "add", "phone", "--json", *file).stdout)
    assert key.startswith("ana-")
    assert (other["name"], other["tenant"]) == ("phone", "phone")
    listed = run("keys", "ls", *file).stdout
    assert "laptop" in listed
    assert "acme" in listed
    assert key not in listed
    names = json.loads(run("keys", "ls", "--json", *file).stdout)
    assert [(record["name"], record["tenant"]) for record in names] == [
        ("laptop", "acme"),
        ("phone", "phone"),
    ]
    members = {"name", "tenant", "operator", "profile", "shared", "created"}
    assert all(record.keys() == members for record in names)
    again = run("keys", "add", "laptop", *file)
    assert (again.returncode, len(again.stderr.strip().splitlines())) == (1, 1)
    revoked = run("keys", "revoke", "laptop", "--json", *file)
    assert json.loads(revoked.stdout) == {"name": "laptop", "tenant": "acme"}
    assert run("keys", "revoke", "laptop", *file).returncode == 1
    environment = {"ANAPHORA_KEYS_FILE": str(tmp_path / "keys.json")}
    assert len(json.loads(run("keys", "ls", "--json", env=environment).stdout)) == 1


def test_operators_and_namespaces_are_given_and_listed(tmp_path: Path) -> None:
    file = ("--keys-file", tmp_path / "keys.json")
    made = json.loads(run("keys", "add", "root", "--operator", "--json", *file).stdout)
    assert made["operator"] is True
    laptop = ("keys", "add", "laptop", "--tenant", "acme", "--profile")
    assert run(*laptop, "google", *file).returncode == 1
    assert run(*laptop, "anthropic", *file).returncode == 0
    shared = run("keys", "share", "acme", "house", "--json", *file)
    assert json.loads(shared.stdout) == {"tenant": "acme", "shared": "house"}
    listed = json.loads(run("keys", "ls", "--json", *file).stdout)
    found = [(record["name"], record["operator"], record["shared"]) for record in listed]
    assert found == [("root", True, None), ("laptop", False, "house")]
    shown = [line.split() for line in run("keys", "ls", *file).stdout.splitlines()]
    assert any(row[:3] == ["root", "root", "yes"] for row in shown)
    assert any(row[:4] == ["laptop", "acme", "anthropic", "house"] for row in shown)
    assert [record["profile"] for record in listed] == [None, "anthropic"]
    for arguments in (("share", "laptop", "house"), ("share", "acme", "a b"), ("unshare", "root")):
        refused = run("keys", *arguments, *file)
        assert (refused.returncode, len(refused.stderr.strip().splitlines())) == (1, 1)
    unshared = run("keys", "unshare", "acme", "--json", *file)
    assert json.loads(unshared.stdout) == {"tenant": "acme", "shared": None}
    assert run("keys", "unshare", "acme", *file).returncode == 1


def test_help_of_the_server_names_every_option_and_its_default() -> None:
    shown = " ".join(run("serve", "--help", env={"COLUMNS": "300"}).stdout.split())
    for name, item in FIELDS.items():
        if name != "model":
            assert f"--{spelled(name)} " in shown or f"--{spelled(name)}/" in shown
        if isinstance(item.default, str):
            assert f"Default: {item.default}." in shown
    assert "Default: 8080." in shown
    assert "Default: 32MiB." in shown
    assert "K[,V]" in shown
