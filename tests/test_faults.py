"""Faults that broke servers like this one, each as the smallest try through the library.

On the tiny model; ``ANAPHORA_SOAK=1`` (``make soak``) runs them on the bundled model too, with full
counts. Answers are compared in ``exact`` mode with those of a cold twin: a second model without
a cache.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from anaphora import GREEDY, Model, Reply, Sampling
from anaphora.bundled import load_test_document
from anaphora.cache.disk import read_secret
from anaphora.cache.files import read_header
from anaphora.cache.format import Seals
from anaphora.cache.keys import Segment, Tokens
from anaphora.cache.store import CacheStats
from anaphora.engine.protocol import CacheHints
from anaphora.errors import SettingsError
from tests.conftest import SOAK
from tests.test_serve import Served

Load = Callable[..., Model]
GRID = 64


def document(model: Model, tokens: int, salt: str = "") -> str:
    """About ``tokens`` tokens of plain English, opening with ``salt``."""
    text = load_test_document(8 * tokens)
    return salt + " " + text[: len(text) * tokens // len(model.tokenize(text))]


@pytest.fixture(params=["tiny", pytest.param("bundled", marks=pytest.mark.model)])
def path(request: pytest.FixtureRequest, tiny_llama: Path) -> Path:
    if request.param == "tiny":
        return tiny_llama
    if not SOAK:
        pytest.skip("on the bundled model with ANAPHORA_SOAK=1")
    bundled: Path = request.getfixturevalue("bundled")
    return bundled


@pytest.fixture
def load(path: Path, tmp_path: Path) -> Iterator[Load]:
    models: list[Model] = []

    def load_(**settings: object) -> Model:
        values: dict[str, object] = {
            "cache_dir": tmp_path / "cache",
            "memory_budget": 512 << 20,
            "disk_budget": 2 << 30,
            "context_size": 8192,
            "parallel": 1,
            **settings,
        }
        models.append(Model.load(path, **values))  # type: ignore[arg-type]
        return models[-1]

    yield load_
    for model in models:
        model.close()


def ask(model: Model, messages: Sequence[Mapping[str, Any]], tokens: int = 24) -> Reply:
    prompt = model.render(messages)
    return model.generate(prompt.tokens, max_tokens=tokens, sampling=GREEDY)


def shared(a: Sequence[int] | Tokens, b: Sequence[int] | Tokens) -> int:
    """Length (tokens) of the common prefix."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def test_sampled_text_that_tokenizes_differently_still_hits_the_first_prompt(load: Load) -> None:
    warm, twin = load(exact=True), load(exact=True, cache_dir=None, memory_budget=0)
    text = "Invent twenty part numbers full of brackets, tildes, stars and foreign letters"
    first: list[dict[str, Any]] = [
        {"role": "system", "content": document(warm, 1500)},
        {"role": "user", "content": text},
    ]
    prompt = warm.render(first).tokens
    known: list[Tokens] = []
    differed = 0
    for seed in range(10):
        said = warm.generate(prompt, max_tokens=300, sampling=Sampling(temperature=1.3, seed=seed))
        following = [
            *first,
            {"role": "assistant", "content": said.text},
            {"role": "user", "content": "Repeat the last line."},
        ]
        rendered = warm.render(following).tokens
        known.append(np.array([*prompt, *said.tokens], dtype=np.int32))
        differed += shared(rendered, known[-1]) < len(known[-1])
        hit, cold = ask(warm, following), ask(twin, following)
        assert hit.usage.prompt_tokens == cold.usage.prompt_tokens == len(rendered)
        assert hit.tokens == cold.tokens
        alike = max(shared(rendered, other) for other in known)
        assert len(prompt) <= hit.usage.read_tokens <= alike
        assert (len(prompt) - 1) // GRID * GRID <= hit.usage.found.total <= alike
        known.append(np.array([*rendered, *hit.tokens], dtype=np.int32))
        # Nothing of the twin's own may be reused, or it would be no reference.
        twin.close()
        twin = load(exact=True, cache_dir=None, memory_budget=0)
    assert differed, "no text tokenized differently: nothing was tried"


@pytest.mark.parametrize(
    ("before", "inside", "after"),
    [
        (" The", " inter", "national law"),
        (" one", "\n", "\n\ntwo"),
        (" number", " 123", "456"),
        (" and then", " ", "more"),
        (" family", " \U0001f468\u200d\U0001f469", "\u200d\U0001f467\u200d\U0001f466"),
        (" the", " end", "\n"),
    ],
)
def test_a_breakpoint_in_the_middle_of_anything(
    load: Load, before: str, inside: str, after: str
) -> None:
    model, twin = load(exact=True), load(exact=True, cache_dir=None, memory_budget=0)
    text = document(model, 1500) + before
    question: dict[str, Any] = {"role": "user", "content": "What is it?"}

    def system(*parts: str) -> list[dict[str, Any]]:
        content = [{"type": "text", "text": part} for part in parts]
        return [{"role": "system", "content": content}, question]

    head, whole = system(text + inside), system(text + inside + after)
    split = system(text + inside, after)
    tokens, longer = model.render(head).tokens, model.render(whole).tokens
    assert model.render(split).tokens.tolist() == longer.tolist()
    alike = shared(tokens, longer)
    pieces = b"".join(model.vocabulary.piece(int(token)) for token in longer[:alike])
    assert text.encode() in pieces, "what both have in common reaches the whole words"

    ask(model, head)
    hit, cold = ask(model, split), ask(twin, split)
    assert hit.usage.read_tokens == alike
    assert hit.usage.found.total == alike // GRID * GRID
    assert hit.tokens == cold.tokens
    again = ask(model, whole)
    assert again.usage.read_tokens == len(longer)
    assert again.tokens == cold.tokens
    for usage in (hit.usage, again.usage):
        assert usage.read_tokens + usage.written_tokens == usage.prompt_tokens == len(longer)


@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_client_that_trims_the_answer_keeps_the_hit(load: Load, ending: str) -> None:
    model, twin = load(exact=True), load(exact=True, cache_dir=None, memory_budget=0)
    first: list[dict[str, Any]] = [
        {"role": "system", "content": document(model, 2000)},
        {"role": "user", "content": "Go on."},
    ]
    prompt = model.render(first)
    stops = Sampling(temperature=0.0, stop=("\n\n",))
    said = model.generate(prompt.tokens, max_tokens=200, sampling=stops).text
    following = [
        *first,
        {"role": "assistant", "content": said.rstrip() + ending},
        {"role": "user", "content": "And then?"},
    ]
    hit, cold = ask(model, following), ask(twin, following)
    assert hit.tokens == cold.tokens
    assert hit.usage.found.total >= (len(prompt.tokens) - 1) // GRID * GRID


SERVE = """
import sys, time
from anaphora import GREEDY, Model
from anaphora.bundled import load_test_document
path, folder, idle = sys.argv[1], sys.argv[2], float(sys.argv[3])
model = Model.load(path, cache_dir=folder, memory_budget=256 << 20, context_size=8192)
text = load_test_document(3 * 3000)
print("ready", flush=True)
reply = model.generate(model.tokenize(text)[:3000], max_tokens=8, sampling=GREEDY)
print(reply.usage.found.total, reply.usage.read_tokens, *reply.tokens, flush=True)
if idle < 0:
    model.close()
else:
    time.sleep(idle)
"""


def serve(path: Path, folder: Path, idle: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVE, str(path), str(folder), str(idle)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def read_line(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return [int(word) for word in process.stdout.readline().split()]


class TestRestarts:
    def test_closing_right_after_the_answer_keeps_everything(
        self, path: Path, tmp_path: Path
    ) -> None:
        first = serve(path, tmp_path, -1)
        found, _, *answer = read_line(first)
        began = time.monotonic()
        assert first.wait(30) == 0
        assert time.monotonic() - began < 10
        again = serve(path, tmp_path, -1)
        assert read_line(again) == [2999, 3000, *answer]
        assert found == 0
        assert again.wait(30) == 0

    def test_a_kill_ten_seconds_after_the_last_answer_loses_nothing(
        self, path: Path, tmp_path: Path
    ) -> None:
        first = serve(path, tmp_path, 60)
        _, _, *answer = read_line(first)
        time.sleep(10 if SOAK else 4)
        first.send_signal(signal.SIGKILL)
        first.wait()
        again = serve(path, tmp_path, -1)
        assert read_line(again) == [2999, 3000, *answer]
        assert again.wait(30) == 0

    @pytest.mark.parametrize("moment", [0.0, 0.05, 0.3, 1.2])
    def test_a_kill_at_any_moment_leaves_a_sound_cache(
        self, path: Path, tmp_path: Path, moment: float
    ) -> None:
        reference = serve(path, tmp_path / "reference", -1)
        _, _, *answer = read_line(reference)
        reference.wait(30)
        first = serve(path, tmp_path / "cache", 60)
        read_line(first)
        time.sleep(moment)
        first.send_signal(signal.SIGKILL)
        first.wait()
        again = serve(path, tmp_path / "cache", -1)
        found, read, *tokens = read_line(again)
        assert tokens == answer
        assert found <= read <= 3000
        assert again.wait(30) == 0


class TestServer:
    """``anaphora serve``, ended by SIGTERM: at once after an answer, and in the midst of one."""

    @pytest.fixture
    def start(self, path: Path, tmp_path: Path) -> Iterator[Callable[[], Served]]:
        processes: list[subprocess.Popen[str]] = []

        def start_() -> Served:
            command = [sys.executable, "-m", "anaphora.cli", "serve", str(path), "--port", "0"]
            command += ["--cache-dir", str(tmp_path / "cache"), "--ctx-size", "8192", "--exact"]
            command += ["--keys-file", str(tmp_path / "keys.json"), "--drain-seconds", "0"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            assert process.stdout is not None
            shown = ""
            while "curl" not in shown:
                line = process.stdout.readline()
                assert line, "the server ended"
                shown += line
            return Served(process, shown)

        yield start_
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def test_what_was_answered_and_what_was_begun_hit_after_a_restart(
        self, load: Load, start: Callable[[], Served]
    ) -> None:
        twin = load(exact=True, cache_dir=None, memory_budget=0)
        # So that the answer does not end by itself.
        ends = {str(token): -100 for token in twin.vocabulary.end_of_generation}

        def messages(salt: str, question: str) -> list[dict[str, Any]]:
            return [
                {"role": "system", "content": document(twin, 3000, salt)},
                {"role": "user", "content": question},
            ]

        def body(salt: str, question: str, **more: object) -> dict[str, Any]:
            options = {"max_tokens": 8, "temperature": 0, **more}
            return {"messages": messages(salt, question), **options}

        def post(served: Served, salt: str, question: str) -> dict[str, Any]:
            answer = httpx.post(chat(served), json=body(salt, question), timeout=120)
            assert answer.status_code == 200
            found: dict[str, Any] = answer.json()
            return found

        def chat(served: Served) -> str:
            return f"{served.url}/v1/chat/completions"

        def stop(served: Served) -> None:
            began = time.monotonic()
            assert served.stop() == 0
            assert time.monotonic() - began < 10

        def assert_hit(served: Served, salt: str) -> None:
            first = twin.render(messages(salt, "Who?")).tokens
            other = twin.render(messages(salt, "Where to?")).tokens
            answer = post(served, salt, "Where to?")
            usage = answer["usage"]
            assert usage["prompt_tokens"] == len(other)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert 0.95 * shared(first, other) <= cached <= shared(first, other)
            cold = ask(twin, messages(salt, "Where to?"), 8)
            assert answer["choices"][0]["message"]["content"] == cold.text

        served = start()
        post(served, "answered", "Who?")
        stop(served)

        served = start()
        assert_hit(served, "answered")
        endless = body("begun", "Who?", stream=True, max_tokens=4000, logit_bias=ends)
        with httpx.stream("POST", chat(served), json=endless, timeout=120) as response:
            lines = response.iter_lines()
            while not re.search(r'"content": ?"[^"]', next(lines)):
                pass  # the prompt is not computed yet
            stop(served)
            assert any('"error"' in line for line in lines)

        served = start()
        assert_hit(served, "begun")
        stop(served)


def block_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/blocks/*/*"))


def stats_of(model: Model) -> CacheStats:
    stats = model.stats()
    assert stats is not None
    return stats


def chain_files(folder: Path, tokens: Tokens, owner: str = "local") -> list[Path]:
    """Block files of a prompt, first block first."""
    chain = {}
    for file in block_files(folder):
        secret = read_secret(file.parents[2] / "mac.key")
        assert secret is not None
        block = read_header(file, Seals(secret)).block
        ours = tokens[block.start : block.end]
        if block.owner == owner and len(ours) and np.array_equal(block.tokens[: len(ours)], ours):
            chain[block.start] = file
    return [chain[start] for start in sorted(chain)]


def flip(file: Path, at: float) -> None:
    data = bytearray(file.read_bytes())
    position = min(int(len(data) * at), len(data) - 1)
    data[position] ^= 0x10
    file.write_bytes(data)


def swap(a: Path, b: Path) -> None:
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)


def replace_by_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("/etc/hostname")


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE: dict[str, Callable[[list[Path], Path], object]] = {
    "emptied": lambda files, _: files[2].write_bytes(b""),
    "halved": lambda files, _: os.truncate(files[2], files[2].stat().st_size // 2),
    "flipped at the start": lambda files, _: flip(files[2], 0),
    "flipped in the middle": lambda files, _: flip(files[2], 0.5),
    "flipped at the end": lambda files, _: flip(files[2], 1),
    "appended to": lambda files, _: files[2].open("ab").write(b"x"),
    "swapped": lambda files, _: swap(files[2], files[3]),
    "a folder": lambda files, _: replace_by_folder(files[2]),
    "a link": lambda files, _: replace_by_link(files[2]),
    "gone": lambda files, _: files[2].unlink(),
    "index deleted": lambda _, space: (space / "index.sqlite").unlink(),
    "index flipped": lambda _, space: flip(space / "index.sqlite", 0.5),
    "index emptied": lambda _, space: (space / "index.sqlite").write_bytes(b""),
    "index foreign": lambda _, space: (space / "index.sqlite").write_bytes(b"junk" * 5000),
    "key damaged": lambda _, space: flip(space / "mac.key", 0.5),
    "key deleted": lambda _, space: (space / "mac.key").unlink(),
}


class TestDamage:
    @pytest.mark.parametrize("kind", DAMAGE)
    def test_damage_is_a_miss_and_nothing_else_suffers(
        self, load: Load, tmp_path: Path, kind: str
    ) -> None:
        model = load(exact=True)
        tokens = model.tokenize(document(model, 3200))[:3000]
        text = load_test_document(200_000)
        others = [
            model.tokenize(text[start : start + 2000]) for start in (60_000, 110_000, 160_000)
        ]
        expected = model.generate(tokens, max_tokens=12, sampling=GREEDY).tokens
        answers = [model.generate(t, max_tokens=6, sampling=GREEDY).tokens for t in others]
        model.close()
        (space,) = (folder for folder in (tmp_path / "cache").iterdir() if folder.is_dir())
        chain = chain_files(tmp_path / "cache", tokens)
        assert len(chain) == 12
        DAMAGE[kind](chain, space)

        model = load(exact=True)
        hit = model.generate(tokens, max_tokens=12, sampling=GREEDY)
        assert hit.tokens == expected
        if kind.startswith("key"):
            assert hit.usage.found.total == 0
        elif kind.startswith("index"):
            assert hit.usage.found.total >= 2944
        else:
            assert hit.usage.found.total == 512
            if kind == "gone":
                assert stats_of(model).misses.gone == 1
                assert stats_of(model).broken_promises > 0
            else:
                assert stats_of(model).misses.damaged > 0
        assert hit.usage.read_tokens <= 3000
        for prompt, answer in zip(others, answers, strict=True):
            assert model.generate(prompt, max_tokens=6, sampling=GREEDY).tokens == answer
        again = model.generate(tokens, max_tokens=12, sampling=GREEDY)
        assert again.tokens == expected
        assert again.usage.found.total >= 2944
        model.close()

    def test_damage_while_the_model_runs(self, load: Load, tmp_path: Path) -> None:
        model = load(exact=True, memory_budget=0)
        tokens = model.tokenize(document(model, 3200))[:3000]
        expected = model.generate(tokens, max_tokens=12, sampling=GREEDY).tokens
        model.close()
        model = load(exact=True)
        for file in chain_files(tmp_path / "cache", tokens)[2:5]:
            flip(file, 0.7)
        hit = model.generate(tokens, max_tokens=12, sampling=GREEDY)
        assert (hit.usage.found.total, hit.tokens) == (512, expected)
        again = model.generate(tokens, max_tokens=12, sampling=GREEDY)
        assert again.tokens == expected
        assert again.usage.found.total >= 2944

    def test_another_owners_block_is_not_believed(self, load: Load, tmp_path: Path) -> None:
        hints = {name: CacheHints((Segment(name, name.encode()),)) for name in ("ours", "theirs")}
        model = load(exact=True)
        tokens = model.tokenize(document(model, 3200))[:3000]
        (answer, _) = (
            model.generate(tokens, max_tokens=12, sampling=GREEDY, cache=hint).tokens
            for hint in hints.values()
        )
        model.close()
        ours, theirs = (chain_files(tmp_path / "cache", tokens, name) for name in hints)
        assert len(ours) == len(theirs) == 12
        ours[2].write_bytes(theirs[2].read_bytes())

        model = load(exact=True)
        before = stats_of(model).misses.damaged
        hit = model.generate(tokens, max_tokens=12, sampling=GREEDY, cache=hints["ours"])
        assert (hit.usage.found.total, hit.tokens) == (512, answer)
        assert stats_of(model).misses.damaged == before + 1
        other = model.generate(tokens, max_tokens=12, sampling=GREEDY, cache=hints["theirs"])
        assert (other.usage.found.disk, other.tokens) == (2944, answer)
        again = model.generate(tokens, max_tokens=12, sampling=GREEDY, cache=hints["ours"])
        assert again.usage.found.total == 2944
        assert again.tokens == answer

    def test_another_models_block_is_not_believed(self, load: Load, tmp_path: Path) -> None:
        for folder, settings in (("a", {}), ("b", {"kv_type": "f32"})):
            model = load(exact=True, cache_dir=tmp_path / folder, **settings)
            tokens = model.tokenize(document(model, 2000))[:2000]
            expected = model.generate(tokens, max_tokens=12, sampling=GREEDY).tokens
            model.close()
        ours, theirs = (chain_files(tmp_path / name, tokens) for name in ("b", "a"))
        for mine, other in zip(ours, theirs, strict=True):
            mine.write_bytes(other.read_bytes())
        model = load(exact=True, cache_dir=tmp_path / "b", kv_type="f32")
        hit = model.generate(tokens, max_tokens=12, sampling=GREEDY)
        assert hit.usage.found.total == 0
        assert hit.tokens == expected
        assert stats_of(model).misses.damaged > 0


class TestMemory:
    def test_one_prompt_larger_than_the_memory_is_answered_and_stored_elsewhere(
        self, load: Load
    ) -> None:
        model = load()
        small = model.info.bytes_per_token * 1000
        model.close()
        model = load(memory_budget=small)
        tokens = model.tokenize(document(model, 4200))[:4000]
        cold = model.generate(tokens, max_tokens=4, sampling=GREEDY)
        model.close()
        model = load(memory_budget=small)
        hit = model.generate(tokens, max_tokens=4, sampling=GREEDY)
        assert hit.usage.found.disk == 3999
        assert hit.tokens == cold.tokens

    @pytest.mark.parametrize("disk", [True, False])
    def test_one_off_prompts_do_not_push_out_the_one_that_matters(
        self, load: Load, disk: bool
    ) -> None:
        twin = load(exact=True, cache_dir=None, memory_budget=0)
        per_token = twin.info.bytes_per_token
        house = twin.tokenize(document(twin, 2000))[:2000]
        other = twin.tokenize(document(twin, 7000))[:7000]
        # What 64 MiB are to the bundled model, at its 22.5 KiB per token: 2,912 tokens.
        budget = 2912 * per_token
        model = load(exact=True, memory_budget=budget, **({} if disk else {"cache_dir": None}))
        process, peak = psutil.Process(), 0
        expected = twin.generate([*house, 7], max_tokens=8, sampling=GREEDY).tokens
        model.generate(house, max_tokens=1)
        base = process.memory_info().rss
        count = 500 if SOAK else 50
        for number in range(count):
            start = 100 * number % 6000
            one_off = [number // 200, number % 200, *other[start : start + 798]]
            model.generate(one_off, max_tokens=1)
            if number % 10 == 9:
                model.generate([*house, 5], max_tokens=1)
            peak = max(peak, process.memory_info().rss)
            stats = stats_of(model)
            assert stats.memory_used <= stats.memory_budget
        last = model.generate([*house, 7], max_tokens=8, sampling=GREEDY)
        stats = stats_of(model)
        assert last.tokens == expected
        slack = 64 << 20
        assert peak <= base + stats.memory_budget + slack
        if disk:
            # In memory alone the least recently used goes, and between two of its uses come more
            # one-off prompts than fit.
            assert last.usage.found.total == 2000 // GRID * GRID
            new = (count * 800 + 2000) * per_token
            assert stats.bytes_written <= 1.25 * new + count * 2 * 4096
        else:
            assert stats.memory_budget == budget
            assert stats.bytes_written == 0


def test_half_an_emoji_is_the_replacement_character_everywhere(load: Load) -> None:
    model = load()
    assert ask(model, [{"role": "user", "content": "x \ud83d y"}], 2).usage.prompt_tokens
    for broken, mended in (("a \ud83d b", "a \ufffd b"), ("\ud83d\ude00", "\U0001f600")):
        raw = model.tokenize(broken).tolist()
        assert raw == model.tokenize(mended).tolist()
        for role in ("system", "user", "assistant", "tool"):
            pair = [
                model.render([{"role": "user", "content": "q"}, {"role": role, "content": text}])
                for text in (broken, mended)
            ]
            assert pair[0].tokens.tolist() == pair[1].tokens.tolist()
    first = ask(model, [{"role": "user", "content": "\ud83d\ude00 " * 30}], 1)
    second = ask(model, [{"role": "user", "content": "\U0001f600 " * 30}], 1)
    assert second.usage.read_tokens == first.usage.prompt_tokens
    assert model.generate("a\x00b", max_tokens=2).usage.prompt_tokens == 3


def test_half_an_emoji_in_a_stop_text_or_an_owner_harms_nothing(load: Load) -> None:
    model = load()
    free = model.generate("a b", max_tokens=20, sampling=GREEDY)
    for stop in ("\ud83d", "x\ude00", "\ude00\ud83d"):
        reply = model.generate("a b", max_tokens=20, sampling=Sampling(temperature=0, stop=(stop,)))
        assert free.text.startswith(reply.text)
    with pytest.raises(SettingsError) as caught:
        model.generate("a b", cache=CacheHints((Segment("tenant \ud83d"),)))
    assert "\n" not in str(caught.value)
    str(caught.value).encode()
    assert model.generate("a b", max_tokens=20, sampling=GREEDY).tokens == free.tokens
