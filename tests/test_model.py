"""The library on a tiny model: what the README's handful of lines promise."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from anaphora import GREEDY, CacheHints, Chat, Model, Sampling, Segment
from anaphora.cache.index import common_prefix
from anaphora.engine.host import EngineHost
from anaphora.engine.protocol import Done, Request
from anaphora.errors import (
    CacheDirectoryError,
    EngineError,
    ModelFileError,
    PromptError,
    PromptTooLongError,
    SettingsError,
    TemplateError,
)
from anaphora.model import MessageLike, _request
from anaphora.prompt.conversation import Message
from tests.conftest import TinyModel

Load = Callable[..., Model]
ENDLESS = Sampling(logit_bias=dict.fromkeys(range(260, 263), -1e9))
"""For answers that must not end at once: without the tiny model's control tokens."""
DOCUMENT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 20


@pytest.fixture
def load(tiny_llama: Path, tmp_path: Path) -> Iterator[Load]:
    models: list[Model] = []

    def load_(**settings: object) -> Model:
        values: dict[str, object] = {
            "cache_dir": tmp_path / "cache",
            "memory_budget": 64 << 20,
            "threads": 1,
            **settings,
        }
        models.append(Model.load(tiny_llama, **values))  # type: ignore[arg-type]
        return models[-1]

    yield load_
    for model in models:
        model.close()


def test_generate_tells_what_was_read_and_computed(load: Load) -> None:
    model = load()
    cold = model.generate(DOCUMENT, max_tokens=8, sampling=GREEDY)
    warm = model.generate(DOCUMENT, max_tokens=8, sampling=GREEDY)
    assert cold.usage.read_tokens == 0
    assert cold.usage.computed_tokens == cold.usage.written_tokens == cold.usage.prompt_tokens
    assert warm.usage.read_tokens == warm.usage.prompt_tokens
    assert warm.usage.computed_tokens == 1
    assert warm.usage.found.total == warm.usage.prompt_tokens - 1
    assert (warm.text, warm.tokens) == (cold.text, cold.tokens)
    assert warm.times.first_token > 0


def test_a_stream_joined_is_the_whole_answer(load: Load) -> None:
    model = load()
    stream = model.stream(DOCUMENT, max_tokens=40, sampling=Sampling(seed=3))
    assert stream.started.prompt_tokens == len(model.tokenize(DOCUMENT))
    text = "".join(stream)
    assert text == stream.reply.text
    again = model.generate(DOCUMENT, max_tokens=40, sampling=Sampling(seed=3))
    assert again.text == text


def test_leaving_a_stream_early_cancels_it_and_keeps_what_was_computed(load: Load) -> None:
    model = load(parallel=1)
    for _ in model.stream(DOCUMENT, max_tokens=5000, sampling=ENDLESS):
        break
    reply = model.generate(DOCUMENT, max_tokens=1)
    assert reply.usage.computed_tokens == 1
    stream = model.stream(DOCUMENT, max_tokens=5000, sampling=ENDLESS)
    stream.close()
    assert list(stream) == []
    with pytest.raises(EngineError, match="cancelled"):
        _ = stream.reply


def test_a_loop_left_early_cancels_at_once(load: Load) -> None:
    model = load()
    ends = dict.fromkeys(model.vocabulary.end_of_generation, -1e9)
    stream = model.stream(DOCUMENT, max_tokens=5000, sampling=Sampling(logit_bias=ends))
    gc.disable()
    try:
        for _ in stream:
            break
        with pytest.raises(EngineError, match="cancelled"):
            _ = stream.reply
    finally:
        gc.enable()


def test_a_stream_that_failed_says_why_every_time(load: Load) -> None:
    stream = load(context_size=256).stream(DOCUMENT, sampling=ENDLESS)
    for _ in range(2):
        with pytest.raises(PromptTooLongError):
            _ = stream.started
        with pytest.raises(PromptTooLongError):
            _ = stream.reply


def test_an_interrupt_while_waiting_cancels(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = load().stream(DOCUMENT, max_tokens=5000, sampling=ENDLESS)

    class Interrupted:
        def get(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(stream, "_events", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        _ = stream.started
    assert list(stream) == []


def test_a_turn_that_was_cut_off_is_not_remembered(load: Load) -> None:
    model = load()
    ends = dict.fromkeys(model.vocabulary.end_of_generation, -1e9)
    chat = model.chat(DOCUMENT, max_tokens=5000, sampling=Sampling(logit_bias=ends))
    stream = chat.stream("What time is it?")
    assert stream.started.prompt_tokens
    model.close()
    with pytest.raises(EngineError, match="cancelled"):
        _ = stream.reply
    assert [message.role for message in chat.messages] == ["system"]


def test_a_chat_reads_everything_but_the_new_lines(load: Load) -> None:
    model = load()
    chat = model.chat("Answer from this text. " + DOCUMENT, max_tokens=30)
    first = chat.send("What time is it?")
    second = chat.send("And the weather?")
    assert [m.role for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chat.messages[2].text == first.text
    assert second.usage.read_tokens >= first.usage.prompt_tokens
    # The answer is text again when it comes back, and random bytes rarely survive that.
    assert second.usage.computed_tokens <= second.usage.prompt_tokens - first.usage.prompt_tokens


def test_settling_the_turn_prepares_the_next_one(load: Load) -> None:
    model = load()
    chat = model.chat(DOCUMENT, max_tokens=60, sampling=Sampling(seed=1))
    chat.send("What time is it?")
    wait_until_settled(model, chat)
    question = Message.parse({"role": "user", "content": "And the weather?"})
    following = [*chat.messages, question]
    prompt = model.render(following)
    ready = opened(model, chat.messages)
    reply = model.generate(prompt.tokens, max_tokens=1)
    assert reply.usage.computed_tokens == len(prompt.tokens) - ready
    assert reply.usage.found.decoded == 0 or reply.usage.read_tokens >= ready


def opened(model: Model, messages: Iterable[MessageLike]) -> int:
    """Tokens of a conversation up to where the text of the next user message begins."""
    one, other = (
        model.render([*messages, {"role": "user", "content": text}]).tokens for text in "XY"
    )
    return common_prefix(one, other)


def wait_until_settled(model: Model, chat: Chat) -> None:
    """Another settling of the same conversation is served after the first."""
    done = threading.Event()
    prompt = model.render(chat.messages, add_generation_prompt=False)
    request = Request("probe", prompt.tokens, 0, background=True)
    model._host.submit(request, lambda event: done.set() if isinstance(event, Done) else None)
    assert done.wait(30)


def test_without_a_cache_there_is_nothing_to_settle(tiny_model: TinyModel) -> None:
    with Model.load(tiny_model("mamba"), cache_dir=None, context_size=2048) as model:
        model.chat(DOCUMENT, max_tokens=5).send("What time is it?")
        assert isinstance(model.host, EngineHost)
        assert not model.host._listeners.ids


def test_a_restart_reads_from_disk(load: Load) -> None:
    first = load()
    cold = first.generate(DOCUMENT, max_tokens=8, sampling=GREEDY)
    first.close()
    warm = load().generate(DOCUMENT, max_tokens=8, sampling=GREEDY)
    assert warm.usage.found.disk == cold.usage.prompt_tokens - 1
    assert warm.usage.read_tokens == cold.usage.prompt_tokens
    assert warm.text == cold.text


def test_a_program_that_just_ends_keeps_what_it_computed(
    load: Load, tiny_llama: Path, tmp_path: Path
) -> None:
    program = (
        "import sys; from anaphora import Model\n"
        "model = Model.load(sys.argv[1], cache_dir=sys.argv[2])\n"
        "print(model.generate(sys.argv[3], max_tokens=2).usage.prompt_tokens)\n"
    )
    command = [sys.executable, "-c", program, str(tiny_llama), str(tmp_path / "cache"), DOCUMENT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    warm = load().generate(DOCUMENT, max_tokens=2)
    assert warm.usage.read_tokens == int(ended.stdout)
    assert warm.usage.found.disk == warm.usage.prompt_tokens - 1


def test_several_threads_share_one_model(load: Load) -> None:
    model = load()
    expected = model.generate(DOCUMENT, max_tokens=20, sampling=GREEDY).text
    answers: list[str] = []

    def ask() -> None:
        answers.append(model.generate(DOCUMENT, max_tokens=20, sampling=GREEDY).text)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 6


def test_a_second_process_on_the_folder_works_from_memory_and_says_so(load: Load) -> None:
    first = load()
    second = load()
    assert first.info.warnings == ()
    (warning,) = second.info.warnings
    assert "memory only" in warning
    assert second.generate(DOCUMENT, max_tokens=2).usage.found.total == 0
    assert second.generate(DOCUMENT, max_tokens=2).usage.computed_tokens == 1


def test_without_a_folder_the_cache_is_in_memory(load: Load) -> None:
    model = load(cache_dir=None)
    model.generate(DOCUMENT, max_tokens=2)
    assert model.generate(DOCUMENT, max_tokens=2).usage.computed_tokens == 1


def test_a_stop_text_of_two_halves_is_the_character(load: Load) -> None:
    model = load()
    emoji = "\U0001f600"
    force = Sampling(temperature=0.0, logit_bias={0xF0: 1e9}, stop=("\ud83d\ude00",))
    stream = model.stream(DOCUMENT, max_tokens=1, sampling=force)
    assert stream.reply.finish_reason == "length"
    request = _request(model.tokenize("x"), 1, force, CacheHints())
    assert request.sampling.stop == (emoji,)


def test_stats_count_a_look_up_once_for_each_request(load: Load) -> None:
    model = load(parallel=1)
    streams = [model.stream(DOCUMENT, max_tokens=20, sampling=ENDLESS) for _ in range(4)]
    for stream in streams:
        assert stream.reply.usage.generated_tokens > 0
    stats = model.stats()
    assert stats is not None
    assert stats.lookups == 4
    assert stats.misses.absent <= 4
    assert stats.memory_budget == 64 << 20
    model.close()
    with pytest.raises(EngineError, match="closed"):
        model.stats()


def test_closing_the_model_ends_its_streams_with_an_error(load: Load) -> None:
    model = load()
    stream = model.stream(DOCUMENT, max_tokens=6000, sampling=ENDLESS)
    assert stream.started
    model.close()
    with pytest.raises(EngineError, match="cancelled"):
        list(stream)
    with pytest.raises(EngineError, match="cancelled"):
        _ = stream.reply


def test_tenants_are_apart(load: Load) -> None:
    model = load()
    ours = CacheHints((Segment("us", b"secret"),))
    theirs = CacheHints((Segment("them", b"other"),))
    model.generate(DOCUMENT, max_tokens=2, cache=ours)
    assert model.generate(DOCUMENT, max_tokens=2, cache=theirs).usage.read_tokens == 0
    assert model.generate(DOCUMENT, max_tokens=2, cache=ours).usage.computed_tokens == 1


class TestBadInput:
    def test_prompts(self, load: Load) -> None:
        model = load(context_size=256)
        with pytest.raises(PromptTooLongError, match="256"):
            model.generate(DOCUMENT)
        with pytest.raises(PromptError, match="empty"):
            model.generate("")
        with pytest.raises(PromptError):
            model.generate([10**6])
        for prompt in ([2**40], [1.5], [[1], [1, 2]], ["one"], np.array([2**32])):
            with pytest.raises(PromptError):
                model.generate(prompt)  # type: ignore[arg-type]
        with pytest.raises(PromptError, match="role"):
            model.render([{"content": "no role"}])
        assert (
            model.generate("still fine", max_tokens=3, sampling=ENDLESS).usage.generated_tokens == 3
        )

    @pytest.mark.parametrize(
        "request_",
        [
            lambda: {"cache": CacheHints((Segment("half \ud83d"),))},
            lambda: {"cache": CacheHints((Segment("o" * 70_000),))},
            lambda: {"cache": CacheHints((Segment(5),))},  # type: ignore[arg-type]
            lambda: {"cache": CacheHints((Segment("x", "s"),))},  # type: ignore[arg-type]
            lambda: {"cache": CacheHints((Segment("a", end=1.5), Segment("b")))},  # type: ignore[arg-type]
            lambda: {"cache": CacheHints(("a",))},  # type: ignore[arg-type]
            lambda: {"cache": None},
            lambda: {"max_tokens": 2.5},
            lambda: {"max_tokens": None},
            lambda: {"sampling": {}},
            lambda: {"sampling": Sampling(temperature="1")},  # type: ignore[arg-type]
            lambda: {"sampling": Sampling(logit_bias=[1])},  # type: ignore[arg-type]
            lambda: {"sampling": Sampling(logit_bias={1: "x"})},  # type: ignore[dict-item]
            lambda: {"sampling": Sampling(stop=None)},  # type: ignore[arg-type]
        ],
    )
    def test_a_value_of_the_wrong_kind_harms_nobody_else(
        self, load: Load, request_: Callable[[], dict[str, object]]
    ) -> None:
        model = load()
        running = model.stream(DOCUMENT, max_tokens=300, sampling=ENDLESS)
        with pytest.raises(SettingsError):
            model.generate("x", **request_())  # type: ignore[arg-type]
        assert running.reply.usage.generated_tokens > 0
        assert model.generate(DOCUMENT, max_tokens=2).usage.computed_tokens == 1

    def test_a_request_that_cannot_begin_fails_alone(
        self, load: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = load()
        monkeypatch.setattr("anaphora.engine.llamacpp.engine.Sampler", lambda *_: 1 / 0)
        with pytest.raises(EngineError, match="could not begin"):
            model.generate(DOCUMENT)
        monkeypatch.undo()
        assert model.generate(DOCUMENT, max_tokens=3, sampling=ENDLESS).usage.generated_tokens == 3

    @pytest.mark.parametrize(
        "template",
        [
            "{% for x in %}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "{{ 'a' * 10**12 }}",
            "{{ raise_exception('not for you') }}",
        ],
    )
    def test_hostile_templates(self, load: Load, tmp_path: Path, template: str) -> None:
        path = tmp_path / "template.jinja"
        path.write_text(template)
        with pytest.raises(TemplateError) as caught:
            load(chat_template=path).chat().send("hello")
        assert "\n" not in str(caught.value)

    def test_a_cache_folder_that_cannot_be_one(self, load: Load, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text("")
        with pytest.raises(CacheDirectoryError, match="--cache-dir"):
            load(cache_dir=file / "cache")

    @pytest.mark.parametrize(
        "settings",
        [
            {"block_size": 100},
            {"parallel": 0},
            {"context_size": 3},
            {"reserve_tokens": 0},
            {"threads": 0},
            {"flash_attn": "maybe"},
            {"memory_budget": -1},
            {"chat_template": "template.jinja"},
            {"block_size": "256"},
            {"block_size": 256.0},
            {"parallel": 1.5},
            {"parallel": True},
            {"gpu_layers": "all"},
            {"gpu_layers": 10**20},
            {"threads": 10**6},
            {"exact": "no"},
            {"kv_type": None},
            {"llama": None},
            {"adapters": Path("adapter.gguf")},
            {"llama": {"n_threads": 2**40}},
            {"llama": {"rope_freq_base": float("nan")}},
            {"llama": {"split_mode": ["layer"]}},
            {"llama": {"kv_overrides": {1: 2}}},
            {"llama": {"cpu_moe": "x"}},
            {"exact": True, "llama": {"n_ubatch": 32}},
        ],
        ids=str,
    )
    def test_settings_that_cannot_work(self, load: Load, settings: dict[str, object]) -> None:
        with pytest.raises(SettingsError, match="use") as caught:
            load(**settings)
        assert "\n" not in str(caught.value)

    def test_a_file_that_is_no_model_says_why(
        self, load: Load, tiny_adapter: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(ModelFileError, match=r"can't be loaded: (?!.*failed to load model)"):
            Model.load(tiny_adapter, cache_dir=tmp_path)

    def test_a_closed_model_says_so(self, load: Load) -> None:
        model = load()
        model.close()
        with pytest.raises(EngineError, match="closed"):
            model.generate("hello")
