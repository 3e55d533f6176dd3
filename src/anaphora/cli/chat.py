"""``anaphora chat``: a conversation in the terminal."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Annotated

import typer

from anaphora.cli.options import ENGINE, configured
from anaphora.cli.output import err, find_model, out
from anaphora.config import Config
from anaphora.engine.protocol import Sampling
from anaphora.errors import PromptError
from anaphora.model import Chat, Model, Reply


@configured(ENGINE)
def chat(
    config: Config,
    system: Annotated[str | None, typer.Option(help="What the model is told at first.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="For answers that can be repeated.")] = None,
) -> None:
    """Talk to a model, and see what each turn read from the cache and computed.

    Ctrl-C ends an answer, Ctrl-D the conversation; /clear begins a new one.
    """
    path = find_model(config.model, config.cache_dir)
    sampling = Sampling(temperature=temperature, seed=seed)
    with err.status("loading the model"):
        model = Model(path, replace(config.settings(), parallel=1))
    with model:
        info = model.info
        err.print(f"{info.model}, {info.context_size:,} tokens of context", markup=False)
        for warning in info.warnings:
            err.print(warning, markup=False)

        def begin() -> Chat:
            return model.chat(system, max_tokens=max_tokens, sampling=sampling)

        conversation = begin()
        while (text := _ask()) is not None:
            if text == "/clear":
                conversation = begin()
            elif text:
                _answer(conversation, text)


def _ask() -> str | None:
    """The next line of the user; ``None`` at the end."""
    if sys.stdin.isatty():
        try:
            return out.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            out.print()
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None


def _answer(conversation: Chat, text: str) -> None:
    try:
        stream = conversation.stream(text)
        try:
            pieces = iter(stream)  # one iterator for both loops: to drop it is to cancel
            with err.status("reading"):
                first = next(pieces, "")
            for piece in itertools.chain((first,), pieces):
                out.print(piece, end="", markup=False, soft_wrap=True)
                out.file.flush()
        except KeyboardInterrupt:
            stream.close()
            out.print("\n[dim]stopped[/dim]")
            return
        out.print()
        out.print(f"[dim]{_summary(stream.reply)}[/dim]\n")
    except PromptError as error:
        err.print(f"{error}, or say /clear", markup=False, soft_wrap=True)


def _summary(reply: Reply) -> str:
    usage, times = reply.usage, reply.times
    speed = f", {usage.generated_tokens / times.decode:.0f} tokens/s" if times.decode else ""
    return (
        f"prompt {usage.prompt_tokens:,} tokens: {usage.read_tokens:,} read, "
        f"{usage.computed_tokens:,} computed; first token after {times.first_token:.3f} s{speed}"
    )
