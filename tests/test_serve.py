"""``anaphora serve`` as a process of its own: its start, its end, and what stops it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from anaphora.cache.inspect import list_namespaces
from anaphora.engine.identity import model_digest
from anaphora.keys import KeyFile
from tests.conftest import TinyModel
from tests.test_cli import run
from tests.tiny_models import CONTROL, VOCABULARY

ENDLESS = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 190_000,
    "logit_bias": {str(VOCABULARY.index(token)): -100 for token in CONTROL},
}
"""A request that goes on and on: the tokens that would end it are banned."""

DOCUMENT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 20


@dataclass
class Served:
    process: subprocess.Popen[str]
    shown: str
    """What it printed when it was ready."""

    @property
    def url(self) -> str:
        match = re.search(r"Address\s+(\S+)/v1", self.shown)
        assert match, self.shown
        return match[1]

    def ask(
        self, max_tokens: int = 4, content: str = DOCUMENT, **options: object
    ) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60, **options)  # type: ignore[arg-type]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


Start = Callable[..., Served]


@pytest.fixture
def start(tiny_llama: Path, tmp_path: Path) -> Iterator[Start]:
    """``start(*arguments)``: a server on a port of its own, when it takes requests."""
    processes: list[subprocess.Popen[str]] = []

    def start_(
        *arguments: object, env: dict[str, str] | None = None, model: Path = tiny_llama
    ) -> Served:
        command = [sys.executable, "-m", "anaphora.cli", "serve", str(model), "--port", "0"]
        command += ["--cache-dir", str(tmp_path / "cache"), "--threads", "1"]
        command += ["--memory-budget", "64MiB", "--disk-budget", "1GiB"]
        command += ["--keys-file", str(tmp_path / "keys.json"), *map(str, arguments)]
        errors = (tmp_path / "stderr").open("a")
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **(env or {})},
        )
        processes.append(process)
        assert process.stdout is not None
        shown = ""
        for line in process.stdout:
            shown += line
            if "curl" in line:
                return Served(process, shown)
        raise AssertionError((tmp_path / "stderr").read_text())

    yield start_
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_the_ledger_is_whole_when_the_server_has_stopped(start: Start, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("[[price]]\ninput = 2\noutput = 8\n")
    served = start("--prices", prices, "--explain-memory", "0")
    answer = served.ask().json()
    explained = httpx.get(f"{served.url}/v1/cache/explain/{answer['id']}")
    assert explained.status_code == 404, "nothing is remembered"
    assert served.stop() == 0
    shown = run("usage", "--cache-dir", tmp_path / "cache", "--json")
    (total,) = json.loads(shown.stdout)["totals"]
    assert total["requests"] == 1
    assert total["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert float(total["cost"]) > 0


def test_without_a_usage_file_nothing_is_written_down(start: Start, tmp_path: Path) -> None:
    served = start("--usage-file", "off")
    assert served.ask().status_code == 200
    assert served.stop() == 0
    assert list((tmp_path / "cache").glob("usage*")) == []


def test_rules_for_volatile_text_come_from_the_file_unless_switched_off(
    start: Start, tmp_path: Path
) -> None:
    rule = "[[volatile]]\nname = 'clock'\npattern = 'Time [0-9:]+'\n"
    replaced = tmp_path / "replaced.toml"
    replaced.write_text(rule + "action = 'replace'\ntext = 'Time (left out)'\n")

    def second(served: Served) -> httpx.Response:
        """The answer to a system prompt like one before, at another time of day."""
        for clock in ("12:00:01", "23:59:59"):
            system = {"role": "system", "content": f"Time {clock} {DOCUMENT}"}
            body = {"messages": [system, {"role": "user", "content": "Hi"}], "max_tokens": 1}
            answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
        return answer

    kept = second(start("--config", replaced))
    assert kept.headers["anaphora-volatile"] == "clock"
    assert cached(kept) == kept.json()["usage"]["prompt_tokens"]
    lost = second(start("--config", replaced, "--volatile", "off"))
    assert "anaphora-volatile" not in lost.headers
    assert cached(lost) < 64


def test_prices_that_mean_nothing_prevent_the_start(tmp_path: Path, tiny_llama: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("[[price]]\ninput = 2\n")
    shown = run("serve", tiny_llama, "--prices", prices, "--keys-file", tmp_path / "keys.json")
    assert shown.returncode == 1
    assert "output is missing" in shown.stderr


def test_it_says_what_it_serves_and_how_to_try_it(start: Start) -> None:
    served = start("--ctx-size", 2048, "--parallel", 2)
    for text in ("tiny-llama (attention)", "2,048 tokens, 2 at a time", "64.0 MiB", "1.0 GiB in"):
        assert text in served.shown
    assert "only this machine" in served.shown
    assert "\x1b[" not in served.shown
    assert httpx.get(f"{served.url}/health").status_code == 200
    (line,) = (line for line in served.shown.splitlines() if "curl" in line)
    command = [*shlex.split(line), "-s", "--max-time", "30"]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_restart_everything_hits(start: Start, number: int) -> None:
    first = start()
    cold = first.ask().json()["usage"]
    assert first.stop(number) == 0
    assert first.process.stdout is not None
    assert "stopped" in first.process.stdout.read()
    warm = start().ask().json()["usage"]
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["prompt_tokens_details"]["cached_tokens"] == cold["prompt_tokens"] > 256


def test_a_stream_in_flight_is_finished_when_there_is_time(start: Start) -> None:
    served = start()
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 400,
        "stream": True,
        "temperature": 0,
    }
    with httpx.stream(
        "POST", f"{served.url}/v1/chat/completions", json=body, timeout=60
    ) as response:
        lines = response.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert "data: [DONE]" in rest
    assert served.process.wait(30) == 0


def test_a_stream_that_takes_too_long_ends_with_an_error(start: Start, tmp_path: Path) -> None:
    served = start("--drain-seconds", 0)
    body = {**ENDLESS, "stream": True}
    with httpx.stream(
        "POST", f"{served.url}/v1/chat/completions", json=body, timeout=60
    ) as response:
        lines = response.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert any('"error"' in line for line in rest), rest[-4:]
    assert served.process.wait(30) == 0
    assert "Traceback" not in (tmp_path / "stderr").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_what_runs_at_once_and_properly(
    start: Start, tmp_path: Path, number: int
) -> None:
    served = start("--drain-seconds", 3600, "--ctx-size", 200_000)
    cold = served.ask().json()["usage"]["prompt_tokens"]
    url = f"{served.url}/v1/chat/completions"
    with (
        ThreadPoolExecutor() as threads,
        httpx.stream("POST", url, json={**ENDLESS, "stream": True}, timeout=60) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        whole = threads.submit(httpx.post, url, json=ENDLESS, timeout=60)
        while 'running{tenant="local"} 2.0' not in httpx.get(f"{served.url}/metrics").text:
            pass
        served.process.send_signal(number)
        while listens(served):
            pass
        served.process.send_signal(number)
        rest = list(lines)
        refused = whole.result()
    assert any('"error"' in line for line in rest), rest[-4:]
    assert refused.status_code == 503
    assert "stopping" in refused.json()["error"]["message"]
    assert served.process.wait(30) == 0
    assert served.process.stdout is not None
    assert "stopped" in served.process.stdout.read()
    assert (tmp_path / "stderr").read_text() == ""
    warm = start().ask().json()["usage"]
    assert warm["prompt_tokens_details"]["cached_tokens"] == cold


def test_a_connection_that_does_not_end_is_closed(start: Start, tmp_path: Path) -> None:
    served = start("--drain-seconds", 3600)
    address = httpx.URL(served.url)
    with socket.create_connection((address.host, address.port or 0), 60) as client:
        head = "host: localhost\r\nexpect: 100-continue\r\ncontent-length: 9"
        client.sendall(f"POST /v1/messages HTTP/1.1\r\n{head}\r\n\r\n".encode())
        assert b"100" in client.recv(100), "the body is waited for"
        served.process.send_signal(signal.SIGINT)
        while listens(served):
            pass
        served.process.send_signal(signal.SIGINT)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(100) == b""
    assert served.process.wait(30) == 0
    assert (tmp_path / "stderr").read_text() == ""


def test_with_keys_only_their_holders_are_served(start: Start, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    acme, acme4 = file.add("42", "acme"), file.add("2", "acme4")
    served = start("--host", "0.0.0.0")
    assert "YOUR_KEY" in served.shown
    assert served.ask().status_code == 401
    assert served.ask(headers={"authorization": "Bearer ana-wrong"}).status_code == 401

    def cached(key: str) -> int:
        answer = served.ask(headers={"authorization": f"Bearer {key}"}).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(acme) == 0
    assert cached(acme4) == 0, "another tenant's content is not there"
    assert cached(acme) > 0
    file.revoke("42")
    assert served.ask(headers={"authorization": f"Bearer {acme}"}).status_code == 401
    assert cached(acme4) > 0


def test_a_key_may_come_from_the_environment(start: Start) -> None:
    served = start(env={"ANAPHORA_API_KEY": "sesame"})
    assert served.ask().status_code == 401
    assert served.ask(headers={"x-api-key": "sesame"}).status_code == 200
    assert "sesame" not in served.shown


def test_adapters_and_parameters_of_llama_cpp_are_the_models(
    start: Start, tiny_adapter: Path, tmp_path: Path
) -> None:
    options = ("--adapter", f"{tiny_adapter}:0.5", "--llama", "rope_freq_base=20000")
    served = start(*options, env={"ANAPHORA_LLAMA": "n_batch=none,of=these"})
    assert served.ask().status_code == 200
    assert served.stop() == 0
    (info,) = list_namespaces(tmp_path / "cache")
    assert info.identity["adapters"] == f"{model_digest(tiny_adapter)}@0.5"
    assert info.identity["rope_freq_base"] == "20000.0"


def test_other_names_are_refused_without_keys(start: Start) -> None:
    served = start("--allow-host", "box.local")
    for host, status in (
        ("localhost", 200),
        ("box.local:80", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ):
        assert httpx.get(f"{served.url}/health", headers={"host": host}).status_code == status


def test_without_keys_it_serves_no_other_machine(tiny_llama: Path, tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::"):
        failed = serve(tiny_llama, tmp_path, "--host", host)
        assert_one_line(failed)
        assert "anaphora keys add" in failed.stderr


def test_a_port_in_use_is_one_line(tiny_llama: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed = serve(tiny_llama, tmp_path, "--port", port)
    assert_one_line(failed)
    assert f"port {port} of 127.0.0.1 is in use" in failed.stderr


def test_two_that_start_at_once_do_not_both_take_the_port(tiny_llama: Path, tmp_path: Path) -> None:
    """Neither listens while it loads, so the second may only notice afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "anaphora.cli", *arguments(tiny_llama, tmp_path)]
    first, second = (
        subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    )
    try:
        while first.poll() is None and second.poll() is None:
            threading.Event().wait(0.1)
        loser, winner = (first, second) if first.poll() is not None else (second, first)
        assert loser.returncode == 1
        assert loser.stderr is not None
        assert "in use" in loser.stderr.read()
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200
        winner.send_signal(signal.SIGTERM)
        assert winner.wait(30) == 0
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--port", "http"), "--port is 'http'"),
        (("--host", "no.such.host.invalid"), "no address of this machine"),
        (("--host", "192.0.2.1"), "no address of this machine"),
        (("--kv-type", "q99"), "--kv-type is 'q99': use K or K,V"),
        (("--kv-type", "q8_0,q8_0", "--flash-attn", "off"), "--kv-type is 'q8_0,q8_0', and"),
        (("--block-size", "100"), "--block-size is 100"),
        (("--ctx-size", "2000000000"), "use a smaller context"),
        (("--llama", "n_ctx=5"), "--llama has 'n_ctx', which is no llama.cpp parameter"),
        (("--llama", "n_batch=many"), "--llama has n_batch = 'many'"),
        (("--llama", "n_batch"), "--llama is ['n_batch']: use NAME=VALUE"),
        (("--adapter", "/nowhere-adapter.gguf"), "nowhere-adapter.gguf"),
        (("--memory-budget", "8G"), "8GiB"),
        (("--config", "/nowhere.toml"), "nowhere.toml"),
        (("--chat-template", "/nowhere.jinja"), "nowhere.jinja"),
        (("--api-key", "a b"), "printable ASCII"),
    ],
)
def test_bad_settings_are_one_line(
    tiny_llama: Path, tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    failed = serve(tiny_llama, tmp_path, *options)
    assert_one_line(failed)
    assert says in failed.stderr


@pytest.mark.parametrize("name", ["/nowhere.gguf", "hf:nothing", "hf:../..", "/dev/null", "/tmp"])
def test_a_missing_model_is_one_line(tmp_path: Path, name: str) -> None:
    assert_one_line(serve(name, tmp_path))


def listens(served: Served) -> bool:
    """Whether it takes connections."""
    address = httpx.URL(served.url)
    try:
        socket.create_connection((address.host, address.port or 0), 60).close()
    except ConnectionError:
        return False
    return True


def arguments(model: object, folder: Path, *options: object) -> list[str]:
    fixed = ("serve", model, "--cache-dir", folder, "--keys-file", folder / "keys.json")
    return [str(item) for item in (*fixed, "--threads", 1, *options)]


def serve(model: object, folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    ports = () if "--port" in options else ("--port", 0)
    return run(*arguments(model, folder, *ports, *options))


def assert_one_line(failed: subprocess.CompletedProcess[str]) -> None:
    assert failed.returncode == 1
    lines = failed.stderr.strip().splitlines()
    assert len(lines) == 1, failed.stderr
    assert lines[0].startswith("anaphora: ")


def test_two_servers_on_one_folder(start: Start, tmp_path: Path) -> None:
    shared = [f"shared {number} {DOCUMENT}" for number in range(5)]
    first, second = start(), start()
    with ThreadPoolExecutor(4) as threads:
        answers = [
            threads.submit(server.ask, content=text)
            for number in range(5)
            for server in (first, second)
            for text in (shared[number], f"only {server.url} {number} {DOCUMENT}")
        ]
        assert {answer.result().status_code for answer in answers} == {200}
    assert "caches in memory only" in (tmp_path / "stderr").read_text()
    first.stop()
    again = start()
    assert cached(again.ask(content=shared[0])) > 256
    again.process.kill()
    again.process.wait()
    assert second.ask(content=shared[1]).status_code == 200
    # Nobody holds the folder any more, and nothing in it is spoiled.
    last = start()
    assert cached(last.ask(content=shared[0])) > 256
    assert cached(last.ask(content=shared[4])) > 256
    last.stop()
    assert second.stop() == 0
    checked = run("cache", "verify", "--cache-dir", str(tmp_path / "cache"))
    assert checked.returncode == 0, checked.stdout
    size = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())
    assert size < 1 << 30


def test_servers_of_different_models_share_a_folder(
    start: Start, tiny_model: TinyModel, tmp_path: Path
) -> None:
    first = start()
    other = start(model=tiny_model("llama", seed=5))
    assert "caches in memory only" not in (tmp_path / "stderr").read_text()
    assert first.ask().status_code == other.ask().status_code == 200
    for server in (first, other):
        server.stop()
    assert cached(start(model=tiny_model("llama", seed=5)).ask()) > 256
    assert cached(start().ask()) > 256


@pytest.mark.parametrize("engine", ["process", "thread"])
def test_killed_with_its_engine_it_starts_again_with_what_was_written(
    start: Start, tmp_path: Path, engine: str
) -> None:
    server = start("--engine", engine)
    server.ask()
    folder = tmp_path / "cache"
    while not list(folder.glob("*/blocks/*/*")):  # an idle engine writes within seconds
        time.sleep(0.05)
    time.sleep(0.5)
    children = psutil.Process(server.process.pid).children()
    assert len(children) == (engine == "process")
    server.process.kill()
    server.process.wait()
    psutil.wait_procs(children, 10)
    again = start("--engine", engine)
    assert cached(again.ask()) > 256
    assert "memory only" not in (tmp_path / "stderr").read_text()


def cached(response: httpx.Response) -> int:
    tokens: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_case_26_stored_responses_survive_a_killed_server(start: Start, tmp_path: Path) -> None:
    def respond(served: Served, **more: object) -> httpx.Response:
        body = {"input": "Remember: teal.", "max_output_tokens": 4, "temperature": 0, **more}
        return httpx.post(f"{served.url}/v1/responses", json=body, timeout=60)

    served = start()
    first = respond(served).json()
    assert first["store"] is True
    served.process.kill()
    served.process.wait()
    file = tmp_path / "cache" / "responses.db"
    assert file.stat().st_mode & 0o777 == 0o600
    served = start()
    following = respond(served, previous_response_id=first["id"]).json()
    assert following["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert served.stop() == 0
    served = start("--store-days", 0)
    assert respond(served).json()["store"] is False
    assert respond(served, previous_response_id=first["id"]).status_code == 400
