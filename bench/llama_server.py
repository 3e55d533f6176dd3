"""Anaphora's server against llama.cpp's own, both of the same llama.cpp, on the same model file.

Usage: ``python bench/llama_server.py $(bench/build_llama_server)``. See docs/bench.md.
"""

from __future__ import annotations

import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from anaphora.cli.output import AsJson, CacheDir, ModelPath, err, prepare_model
from anaphora.engine.llamacpp import ggml
from anaphora.scratch import scratch_folder
from anaphora.settings import DEFAULT_CACHE_DIR
from client import Answer, ask
from report import Report, Row, paired
from servers import Server, rest, serve
from texts import Texts

PROMPT = 3470
COLD = 3
SESSIONS = 12
SESSION_PROMPT = 1000
ANSWER = 32
DECODED = 128
CONTEXT = 8192
FLAGS = ("-np 1 -c 8192", f"-np {SESSIONS} -c {SESSIONS * CONTEXT} -no-kvu")
"""One slot, and what it doesn't hold in llama-server's prompt cache; or a slot for each session."""
OURS = "anaphora"

QUESTIONS = (
    "What is this document about? Answer in one sentence.",
    "Which of the rules in it would surprise a careful reader?",
    "How do the parts of it belong together?",
)


@dataclass(frozen=True, slots=True)
class Peer:
    """One of the servers: how it is started, and what it is sent beside the conversation."""

    name: str
    start: Callable[[], Server]
    extra: Mapping[str, Any]


class Conversation:
    """A chat that one server has with the client."""

    def __init__(self, server: Server, body: Mapping[str, Any], document: str) -> None:
        self._server = server
        self._body = body
        self._messages = [{"role": "system", "content": document}]

    def say(self, text: str, tokens: int) -> Answer:
        """Ask for an answer of exactly so many tokens."""
        self._messages.append({"role": "user", "content": text})
        body = {**self._body, "messages": self._messages, "max_tokens": tokens}
        answer = ask(self._server.port, "/v1/chat/completions", body)
        self._messages.append({"role": "assistant", "content": answer.text})
        return answer


class Duel:
    """All servers, asked in turn: only one has anything to do at any time."""

    def __init__(self, peers: Sequence[Peer], texts: Texts) -> None:
        self._peers = tuple(peers)
        self._texts = texts
        self._servers: dict[str, Server] = {}
        self.times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        """By row and server: one value a round."""
        self.cached: defaultdict[str, list[float]] = defaultdict(list)
        """Shares of the prompts of later turns that each server had cached."""

    def round(self, number: int) -> None:
        """Every measurement once."""
        documents = [
            self._texts.document(PROMPT, f"Copy {number}-{copy} of the reference.")
            for copy in range(COLD)
        ]
        document = documents[-1]
        self._compare_prompts(document[:200])
        cold: defaultdict[str, list[float]] = defaultdict(list)
        for copy, text in enumerate(documents):
            for name, chat in self._in_turn(number + copy, text):
                cold[name].append(chat.say(QUESTIONS[0], 1).first_token)
        for name, times in cold.items():
            self.times["cold", name].append(statistics.median(times))
        for name, chat in self._in_turn(number, document):
            answer = chat.say(QUESTIONS[1], DECODED)
            _expect(answer.cached_tokens > 0.9 * PROMPT, f"{name} did not hit")
            self.times["hit", name].append(answer.first_token)
            self.times["decode", name].append(answer.speed)
        self._sessions(number)
        self.restart()
        for name, chat in self._in_turn(number, document):
            answer = chat.say(QUESTIONS[2], 1)
            hit = answer.cached_tokens > 0.9 * PROMPT
            _expect(hit or name != OURS, "nothing was left after the restart")
            self.times["restart", name].append(answer.first_token)

    def restart(self) -> None:
        """Stop all servers, and start them again."""
        self._stop()
        self._servers = {peer.name: peer.start() for peer in self._peers}

    def _sessions(self, number: int) -> None:
        """Sessions take turns; the servers do after each turn of all of them."""
        chats: defaultdict[str, list[Conversation]] = defaultdict(list)
        for session in range(SESSIONS):
            document = self._texts.document(SESSION_PROMPT, f"Session {number}-{session}.")
            for peer in self._peers:
                chats[peer.name].append(self._chat(peer, document))
        for turn, question in enumerate(QUESTIONS, start=1):
            for peer in self._order(number):
                self._rest()
                answers = [chat.say(question, ANSWER) for chat in chats[peer.name]]
                first = statistics.median(answer.first_token for answer in answers)
                self.times[f"turn {turn}", peer.name].append(first)
                if turn > 1:
                    self.cached[peer.name] += [a.cached_tokens / a.prompt_tokens for a in answers]

    def _in_turn(self, number: int, document: str) -> Iterator[tuple[str, Conversation]]:
        """A new conversation with each server, when all are at rest."""
        for peer in self._order(number):
            self._rest()
            yield peer.name, self._chat(peer, document)

    def _order(self, number: int) -> Sequence[Peer]:
        """Who comes first changes with every round."""
        first = number % len(self._peers)
        return self._peers[first:] + self._peers[:first]

    def _rest(self) -> None:
        rest(*(process for server in self._servers.values() for process in server.processes))

    def _chat(self, peer: Peer, document: str) -> Conversation:
        body = {"temperature": 0, "logit_bias": self._texts.no_end, **peer.extra}
        return Conversation(self._servers[peer.name], body, document)

    def _compare_prompts(self, document: str) -> None:
        """Make sure that all make the same prompt of a conversation; their first request, too."""
        answers = [self._chat(peer, document).say(QUESTIONS[0], 1) for peer in self._peers]
        lengths = sorted({answer.prompt_tokens for answer in answers})
        _expect(len(lengths) == 1, f"one conversation became prompts of {lengths} tokens")

    def _stop(self) -> None:
        for server in self._servers.values():
            server.stop()

    def __enter__(self) -> Self:
        self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


def main(
    llama_server: Annotated[Path, typer.Argument(help="The program of bench/build_llama_server.")],
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
    model: ModelPath = None,
    flags: Annotated[
        list[str], typer.Option(help="Flags of a llama-server beside the common; may be repeated.")
    ] = list(FLAGS),  # noqa: B006 - never changed
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are printed.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure the servers in one run; exit code 1 if a bar is missed."""
    path, threads = prepare_model(model, cache_dir), ggml.default_threads()
    texts = Texts(path)
    with scratch_folder(cache_dir.expanduser(), "bench") as folder:

        def start_ours() -> Server:
            options = ("--ctx-size", CONTEXT, "--threads", threads, "--flash-attn", "off")
            return serve(path, folder, folder / "anaphora.log", *options)

        def start_theirs(own: str) -> Server:
            common = ("-m", path, "--host", "127.0.0.1", "-t", threads, "-fa", "off")
            command = (llama_server, *common, *shlex.split(own))
            return Server("llama-server", command, folder / "llama-server.log")

        peers = [Peer(OURS, start_ours, {})]
        peers += [Peer(own, partial(start_theirs, own), {"cache_prompt": True}) for own in flags]
        with err.status("starting") as status, Duel(peers, texts) as duel:
            for number in range(rounds):
                status.update(f"round {number + 1} of {rounds}")
                duel.round(number)
    report = _report(duel, path, flags, rounds)
    report.show(as_json)
    if not report.passed:
        raise typer.Exit(1)


def _report(duel: Duel, path: Path, flags: Sequence[str], rounds: int) -> Report:
    names = (OURS, *flags)

    def row(
        what: str, name: str, bar: float | None, unit: str = "ms", *, at_least: bool = False
    ) -> Row:
        values = {peer: duel.times[name, peer] for peer in names}
        medians = {peer: statistics.median(values[peer]) for peer in names}
        best = (max if at_least else min)(flags, key=lambda peer: medians[peer])
        shown = tuple(1e3 * medians[peer] if unit == "ms" else medians[peer] for peer in names)
        return Row(what, shown, unit, paired(values[OURS], values[best]), bar, at_least)

    rows = (
        row(f"cold, {PROMPT} tokens", "cold", 1.05),
        row(f"hit, {PROMPT} + 20 tokens", "hit", None),
        row(f"{SESSIONS} sessions, first turn", "turn 1", None),
        row(f"{SESSIONS} sessions, second turn", "turn 2", 1.0),
        row(f"{SESSIONS} sessions, third turn", "turn 3", 1.0),
        row("the same prompt after a restart", "restart", 0.06),
        row(f"decode at {PROMPT}", "decode", 0.97, "tokens/s", at_least=True),
    )
    shares = {name: statistics.mean(values) for name, values in duel.cached.items()}
    return Report(
        f"{path.name}, flash attention off, medians of {rounds}",
        (OURS, *(f"llama-server {own}" for own in flags)),
        "ratio",
        rows,
        (
            "times to the first token; a ratio is the median of those within each round, to the "
            "llama-server that is best in that row",
            "cached of the later turns' prompts: "
            + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()),
            "the floor of a hit after a restart is a hit in the same process",
        ),
    )


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise RuntimeError(f"the measurement went wrong: {problem}")


if __name__ == "__main__":
    typer.run(main)
