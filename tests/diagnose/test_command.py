"""``anaphora explain`` against a server that answers as the real one does."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner, Result

from anaphora.cli import app
from anaphora.cli.explain import rendered
from anaphora.diagnose.difference import Difference, Excerpt
from anaphora.diagnose.explain import Explanation, explain
from anaphora.diagnose.prompts import Place
from anaphora.errors import ExplainError
from tests.diagnose.support import FILLER, SYSTEM, VOCAB, remembered

EXPLANATION = explain(
    remembered([(SYSTEM, f"It is 12:34:57. {FILLER}")]),
    [remembered([(SYSTEM, f"It is 12:34:56. {FILLER}")], "earlier", time=90)],
    VOCAB,
)


@contextmanager
def server(status: int, body: bytes) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """The address of a server that always answers so, and what it was asked, with which key."""
    asked: list[tuple[str, str | None]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["authorization"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}", asked
        finally:
            running.shutdown()
            thread.join()


def run(*arguments: str, key: str | None = None) -> Result:
    environment = {"ANAPHORA_API_KEY": key, "COLUMNS": "80"}
    return CliRunner().invoke(app, ["explain", *arguments], env=environment)


def test_an_explanation_is_shown_without_colour_where_nobody_sees_it() -> None:
    with server(200, json.dumps(EXPLANATION.as_json()).encode()) as (url, asked):
        shown = run("now", "--url", url)
        assert shown.exit_code == 0, shown.output
        assert shown.stdout == rendered(EXPLANATION).plain + "\n"
        assert "It is [-12:34:56-]. The" in shown.stdout
        assert "It is {+12:34:57+}. The" in shown.stdout
        assert run("a/b ?c", "--url", f"{url}/v1", "--key", "k").exit_code == 0
        assert run("now", "--url", f"{url}/", key="first, second").exit_code == 0
        data = json.loads(run("now", "--url", url, "--json").stdout)
    assert data == EXPLANATION.as_json()
    assert asked[:3] == [
        ("/v1/cache/explain/now", None),
        ("/v1/cache/explain/a%2Fb%20%3Fc", "Bearer k"),
        ("/v1/cache/explain/now", "Bearer first"),
    ]


def test_nothing_a_terminal_would_act_on_is_printed() -> None:
    evil = "\x1b[31m\r\n\x07\u202e[bold]é"
    place = Place("message", 1, name="user\x1b[2J")
    difference = Difference(1, place, *(Excerpt(evil, evil, evil) for _ in range(2)))
    explanation = Explanation("now\x1b[2J", 5, 1, 4, "id", "An id.", "", None, difference, ("a",))
    shown = rendered(explanation).plain
    assert all(line.isprintable() for line in shown.split("\n"))
    assert len(shown.split("\n")) == 6
    assert "[bold]é" in shown


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, b"{}", "not remembered"),
        (401, b"{}", "--key"),
        (500, b"{}", "status 500"),
        (302, b"", "status 302"),
        (200, b"no json", "no server of this version"),
        (200, b"{}", "no server of this version"),
        (200, b'{"cause": "magic"}', "no server of this version"),
        (200, b"\xff", "no server of this version"),
    ],
)
def test_what_cannot_be_explained_is_one_line(status: int, body: bytes, says: str) -> None:
    with server(status, body) as (url, _):
        failed = run("now", "--url", url)
    assert isinstance(failed.exception, ExplainError)
    assert says in str(failed.exception)
    assert "\n" not in str(failed.exception)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8080",
        "file:///etc/passwd",
        "http://",
        "http://[::1",
        "http://x:99999999",
        "http://127.0.0.1:1",
    ],
)
def test_a_server_that_is_not_there_is_one_line(url: str) -> None:
    failed = run("now", "--url", url)
    assert isinstance(failed.exception, ExplainError), failed.exception
    assert "\n" not in str(failed.exception)
