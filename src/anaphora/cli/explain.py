"""``anaphora explain``: why was this a miss?"""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote, urlsplit

import typer
from rich.text import Text

from anaphora.cli.output import AsJson, out
from anaphora.config import variable
from anaphora.errors import ExplainError

if TYPE_CHECKING:
    from anaphora.diagnose.difference import Excerpt
    from anaphora.diagnose.explain import Explanation

_PATIENCE = 30.0


def explain(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The id in the answer.")],
    url: Annotated[
        str, typer.Option(help="Where the server is.", metavar="URL")
    ] = "http://127.0.0.1:8080",
    key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar=variable("api_key"),
            help="API key; a request is explained to its own tenant only.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say why a request read no more from the cache than it did."""
    from anaphora.diagnose.explain import Explanation

    answer = _asked(url, request_id, (key or "").split(",")[0].strip())
    try:
        explanation = Explanation.from_json(answer)
    except ValueError:
        raise ExplainError(
            f"what answers at {url} is no server of this version: choose another with --url"
        ) from None
    if as_json:
        print(json.dumps(explanation.as_json(), indent=2))
    else:
        out.print(rendered(explanation), soft_wrap=True)


def rendered(explanation: Explanation) -> Text:
    """An explanation in lines. The difference is marked with signs, too: ``[-old-]{+new+}``."""
    nearest, difference = explanation.nearest, explanation.difference
    read, prompt = explanation.read_tokens, explanation.prompt_tokens
    computed = explanation.computed_tokens
    request = f"{explanation.request_id}: {read:,} of {prompt:,} tokens read, {computed:,} computed"
    lines = [_line("Request", request), _line("Cause", explanation.sentence, "bold")]
    if explanation.advice:
        lines.append(_line("To do", explanation.advice))
    if nearest is not None:
        text = (
            f"{nearest.request_id}, {nearest.seconds_before:,.1f} s before, shares "
            f"{nearest.shared_tokens:,} of its {nearest.prompt_tokens:,} tokens"
        )
        lines.append(_line("Nearest", text))
    if difference is not None:
        lines.append(_line("Differs", f"token {difference.position:,}, in {difference.place}"))
        lines.append(_line("Before") + _marked(difference.earlier, "[-", "-]", "red"))
        lines.append(_line("Now") + _marked(difference.now, "{+", "+}", "green"))
    if explanation.rules:
        lines.append(_line("Rules", f"applied before: {', '.join(explanation.rules)}"))
    return Text("\n").join(lines)


def _line(label: str, text: str = "", style: str = "") -> Text:
    return Text.assemble((f"{label:<9}", "dim"), (_visible(text), style))


def _marked(excerpt: Excerpt, opening: str, closing: str, colour: str) -> Text:
    before, marked, after = map(_visible, (excerpt.before, excerpt.marked, excerpt.after))
    return Text.assemble(before, (f"{opening}{marked}{closing}", colour), after)


def _visible(text: str) -> str:
    """``text`` on one line; what a terminal would act on is written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _asked(url: str, request_id: str, key: str) -> bytes:
    """What the server says about a request. Raises :class:`ExplainError`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    kind = {"http": HTTPConnection, "https": HTTPSConnection}.get(url.partition(":")[0].lower())
    if kind is None or not host:
        raise ExplainError(f"{url!r} is no address of a server: use one like http://127.0.0.1:8080")
    path = f"{parts.path.rstrip('/').removesuffix('/v1')}/v1/cache/explain/{quote(request_id, '')}"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with closing(kind(host, port, timeout=_PATIENCE)) as connection:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            status, body = answer.status, answer.read()
    except (OSError, HTTPException, ValueError) as error:
        raise ExplainError(
            f"the server at {url} can't be asked ({error}): start it, or choose another with --url"
        ) from error
    match status:
        case 200:
            return bytes(body)
        case 401:
            raise ExplainError(f"the server at {url} wants another key: give one with --key")
        case 404:
            raise ExplainError(
                f"{request_id} is not remembered: it is too long ago, another tenant's, or no id "
                f"of an answer of {url}"
            )
    raise ExplainError(f"the server at {url} answered with status {status}: see its log")
