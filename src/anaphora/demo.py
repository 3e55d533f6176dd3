"""``anaphora demo``: one long document, asked about cold, again, and after a restart.

The question after the restart is asked by a fresh process: this module run as a program.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from anaphora.bundled import load_test_document
from anaphora.engine.protocol import GREEDY
from anaphora.errors import EngineError, SettingsError
from anaphora.model import Model, Reply
from anaphora.scratch import scratch_folder

QUESTIONS = (
    "What is this document about?",
    "Which statement binds names to values?",
    "How are exceptions handled?",
)
ANSWER_TOKENS = 48
_DOCUMENT_TOKENS = 6000
_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Asked:
    """One question and how it was served."""

    title: str
    question: str
    answer: str
    seconds: float
    """Time to first token."""
    read_tokens: int
    computed_tokens: int
    prompt_tokens: int


def run(model_path: Path, cache_dir: Path, show: Callable[[Asked], None]) -> list[Asked]:
    """Ask three times, the last time in a new process; ``show`` gets each as it is answered.

    Blocks go to a folder of this run's own inside ``cache_dir``, so that the first is cold.
    """
    with scratch_folder(cache_dir, "demo") as folder:
        asked = []
        with _load(model_path, folder) as model:
            if not model.info.caching:
                raise SettingsError(
                    f"{model.info.model} runs with the cache off, so there is nothing to show: "
                    "use a model with plain attention"
                )
            document = _document(model)
            for title, question in zip(("cold", "asked again"), QUESTIONS, strict=False):
                asked.append(_ask(model, document, title, question))
                show(asked[-1])
        asked.append(_ask_in_new_process(model_path, folder))
        show(asked[-1])
        return asked


def _load(path: Path, cache_dir: Path) -> Model:
    return Model.load(path, cache_dir=cache_dir, context_size=_CONTEXT, parallel=1)


def _document(model: Model) -> str:
    """As much of the text as makes about ``_DOCUMENT_TOKENS`` tokens, ending with a paragraph."""
    text = load_test_document()
    tokens = len(model.tokenize(text))
    return text[: len(text) * _DOCUMENT_TOKENS // tokens].rpartition("\n\n")[0]


def _ask(model: Model, document: str, title: str, question: str) -> Asked:
    chat = model.chat(
        "Answer from this document.\n\n" + document, max_tokens=ANSWER_TOKENS, sampling=GREEDY
    )
    reply: Reply = chat.send(question)
    usage = reply.usage
    return Asked(
        title,
        question,
        reply.text.strip(),
        reply.times.first_token,
        usage.read_tokens,
        usage.computed_tokens,
        usage.prompt_tokens,
    )


def _ask_in_new_process(model_path: Path, cache_dir: Path) -> Asked:
    command = [sys.executable, "-m", "anaphora.demo", str(model_path), str(cache_dir)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        raise EngineError(f"the fresh process failed: {lines[-1] if lines else 'no message'}")
    return Asked(**json.loads(process.stdout))


def main() -> None:
    model_path, cache_dir = map(Path, sys.argv[1:])
    with _load(model_path, cache_dir) as model:
        asked = _ask(model, _document(model), "after a restart", QUESTIONS[2])
    print(json.dumps(asdict(asked)))


if __name__ == "__main__":
    main()
