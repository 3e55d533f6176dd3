"""The engine in a child process: the same answers, and what happens when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from anaphora import GREEDY, Model, Sampling
from anaphora.engine.process import ProcessHost
from anaphora.errors import EngineError, ModelFileError, ModelNotFoundError, SettingsError

DOCUMENT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 20
ENDLESS = Sampling(logit_bias=dict.fromkeys(range(260, 263), -1e9))

Load = Callable[..., Model]


@pytest.fixture
def load(tiny_llama: Path, tmp_path: Path) -> Iterator[Load]:
    models: list[Model] = []

    def load_(path: Path = tiny_llama, **settings: object) -> Model:
        values: dict[str, object] = {
            "cache_dir": tmp_path / "cache",
            "memory_budget": 64 << 20,
            "threads": 1,
            "engine": "process",
            **settings,
        }
        models.append(Model.load(path, **values))  # type: ignore[arg-type]
        return models[-1]

    yield load_
    for model in models:
        model.close()


def engines() -> list[psutil.Process]:
    """The engine processes of this process."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has just died
            if "worker" in " ".join(child.cmdline()):
                found.append(child)
    return found


def kill(*, comes_back: bool = True) -> None:
    """Kill the engine process, and wait until that was noticed and another one begins."""
    (engine,) = engines()
    engine.kill()
    while comes_back and all(process == engine for process in engines()):
        threading.Event().wait(0.005)


def wait_until_back(model: Model) -> None:
    while not model.host.alive:
        threading.Event().wait(0.01)


def test_it_answers_as_on_a_thread(load: Load) -> None:
    there = load().generate(DOCUMENT, max_tokens=20, sampling=GREEDY)
    here = load(engine="thread", cache_dir=None).generate(DOCUMENT, max_tokens=20, sampling=GREEDY)
    assert (there.text, there.tokens) == (here.text, here.tokens)
    assert there.usage == here.usage


def test_a_chat_reads_its_history(load: Load) -> None:
    chat = load().chat("Be brief.", max_tokens=8, sampling=ENDLESS)
    chat.send(DOCUMENT)
    assert chat.send("And then?").usage.read_tokens > 1000


def test_closing_stores_everything(load: Load) -> None:
    model = load()
    cold = model.generate(DOCUMENT, max_tokens=2)
    model.close()
    with pytest.raises(EngineError, match="closed"):
        model.generate(DOCUMENT)
    model.close()
    warm = load().generate(DOCUMENT, max_tokens=2)
    assert (cold.usage.read_tokens, warm.usage.found.disk > 0) == (0, True)
    assert warm.usage.computed_tokens == 1


def test_killed_it_fails_what_runs_and_comes_back_with_its_cache(load: Load) -> None:
    first = load()
    first.generate(DOCUMENT, max_tokens=2)
    first.close()
    model = load()
    stream = model.stream(DOCUMENT, max_tokens=5000, sampling=ENDLESS)
    texts = iter(stream)
    next(texts)
    kill()
    with pytest.raises(EngineError, match=r"killed by signal 9 .*send the request again"):
        _ = stream.reply
    again = model.generate(DOCUMENT, max_tokens=2)
    assert again.usage.computed_tokens == 1
    assert again.usage.found.disk > 0
    stats = model.stats()
    assert stats is not None
    assert stats.lookups == 1


def test_requests_wait_while_it_is_started_again(load: Load) -> None:
    model = load()
    model.generate("Hi", max_tokens=1)
    (engine,) = engines()
    engine.suspend()
    waiting = [model.stream("Hello", max_tokens=3, sampling=ENDLESS) for _ in range(3)]
    kill()
    for stream in waiting:
        with pytest.raises(EngineError, match="signal 9"):
            _ = stream.reply
    # Whether these arrive before or after it is back: they are served.
    late = [model.stream("Hello", max_tokens=3, sampling=ENDLESS) for _ in range(3)]
    late[1].close()
    assert [s.reply.usage.generated_tokens for s in (late[0], late[2])] == [3, 3]


def test_dying_again_and_again_it_comes_back(load: Load) -> None:
    model = load()
    for _ in range(3):
        model.generate("Hi", max_tokens=1)
        kill()
    assert model.generate("Hi", max_tokens=1).usage.prompt_tokens > 0


def test_a_model_that_is_gone_is_said_and_tried_again(
    load: Load, tiny_llama: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.symlink_to(tiny_llama)
    model = load(path)
    model.generate("Hi", max_tokens=1)
    path.unlink()
    kill(comes_back=False)
    while model.host.alive:
        threading.Event().wait(0.005)
    with pytest.raises(EngineError, match="can't be started"):
        model.generate("Hi", max_tokens=1)  # waits for the process that can't be
    path.symlink_to(tiny_llama)
    wait_until_back(model)
    assert model.generate("Hi", max_tokens=1).usage.prompt_tokens > 0


def test_closed_while_it_is_started_again(load: Load) -> None:
    model = load()
    stream = model.stream(DOCUMENT, max_tokens=5000, sampling=ENDLESS)
    texts = iter(stream)
    next(texts)
    kill()
    model.close()
    with pytest.raises(EngineError):
        _ = stream.reply
    assert not engines()


def test_what_cannot_be_loaded_is_refused_as_on_a_thread(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        load(tmp_path / "nowhere.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    with pytest.raises(ModelFileError):
        load(broken)
    with pytest.raises(SettingsError, match="n_batch"):
        load(llama={"n_batch": "many"})
    with pytest.raises(SettingsError, match="use thread or process"):
        load(engine="cloud")


def test_signals_to_the_whole_group_are_the_parents_to_obey(load: Load) -> None:
    model = load()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        engines()[0].send_signal(number)
    assert model.generate("Hi", max_tokens=1).usage.prompt_tokens > 0


def test_it_ends_with_its_parent(tiny_llama: Path, tmp_path: Path) -> None:
    program = f"""
from anaphora import Model
model = Model.load({str(tiny_llama)!r}, cache_dir={str(tmp_path / "cache")!r}, threads=1,
                   memory_budget=64 << 20, engine="process")
print(model._host._worker._process.pid, flush=True)
model.generate("x" * 3000, max_tokens=4000)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine = psutil.Process(int(parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs([engine], 10)
    assert not alive or alive[0].status() == psutil.STATUS_ZOMBIE


def test_stats_are_refused_without_an_engine(load: Load) -> None:
    model = load()
    assert isinstance(model.host, ProcessHost)
    model.close()
    with pytest.raises(EngineError, match="closed"):
        model.stats()
