"""What a grammar costs: decode speed with one against decode speed without, by the library.

Usage: ``python bench/grammar_speed.py``. See docs/bench.md.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import typer

from anaphora import Grammar, Model, Sampling
from anaphora.cli.output import AsJson, CacheDir, ModelPath, err, prepare_model
from anaphora.settings import DEFAULT_CACHE_DIR
from report import Report, Row, paired

DECODED = 128
CONTEXT = 2048
PLAIN = "no grammar"
PROMPT = "List people of a small town, as JSON."
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "married": {"type": "boolean"},
        "trade": {"enum": ["baker", "smith", "teacher", "tailor"]},
        "likes": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "age", "married", "trade", "likes"],
    "additionalProperties": False,
}
GRAMMARS: Mapping[str, Grammar | None] = {
    PLAIN: None,
    "a JSON schema": Grammar.json_schema({"type": "array", "items": PERSON, "minItems": 100}),
    "one long JSON string": Grammar.json_schema({"type": "string", "minLength": 10_000}),
    "any text": Grammar("regex", r"[\s\S]{10000}"),
}
SAMPLINGS: Mapping[str, Sampling] = {
    "greedy": Sampling(temperature=0),
    "sampled": Sampling(seed=1),
}


def main(
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
    model: ModelPath = None,
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    as_json: AsJson = False,
) -> None:
    """Measure decode speed with grammars and without in one run; exit code 1: a bar is missed."""
    path = prepare_model(model, cache_dir)
    speeds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    with (
        Model.load(path, cache_dir=None, context_size=CONTEXT, parallel=1) as loaded,
        err.status("") as status,
    ):
        prompt = loaded.render([{"role": "user", "content": PROMPT}]).tokens
        no_end = dict.fromkeys(loaded.vocabulary.end_of_generation, -100.0)
        names = list(GRAMMARS)
        for number in range(-1, rounds):  # the first is to warm up
            status.update(f"round {number + 1} of {rounds}")
            names = [*names[1:], names[0]]  # another comes first each time
            for how, sampling in SAMPLINGS.items():
                for name in names:
                    reply = loaded.generate(
                        prompt,
                        max_tokens=DECODED,
                        sampling=replace(sampling, logit_bias=no_end),
                        grammar=GRAMMARS[name],
                    )
                    if reply.usage.generated_tokens != DECODED:
                        raise RuntimeError(f"the measurement went wrong: {reply.text!r}")
                    if number >= 0:
                        speeds[how, name].append((DECODED - 1) / reply.times.decode)
    rows = [_row(how, name, speeds) for how in SAMPLINGS for name in GRAMMARS if name != PLAIN]
    title = f"decode speed, {path.name}, {DECODED} tokens, {rounds} rounds"
    report = Report(title, ("with it", "without"), "ratio", tuple(rows))
    report.show(as_json)
    if not report.passed:
        raise typer.Exit(1)


def _row(how: str, name: str, speeds: Mapping[tuple[str, str], list[float]]) -> Row:
    ours, theirs = speeds[how, name], speeds[how, PLAIN]
    medians = (statistics.median(ours), statistics.median(theirs))
    return Row(f"{name}, {how}", medians, "tokens/s", paired(ours, theirs), 0.9, at_least=True)


if __name__ == "__main__":
    typer.run(main)
