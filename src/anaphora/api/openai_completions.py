"""OpenAI's older completions of a raw prompt: ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from anaphora.answer.pieces import Piece, Text
from anaphora.api import openai_choices
from anaphora.api.edge import ColumnLogprobs, Count, Integer, Off
from anaphora.api.endpoint import Endpoint, takes
from anaphora.api.errors import ApiError
from anaphora.api.generation import Generation
from anaphora.api.openai_choices import ChoicesBody, Form
from anaphora.api.openai_logprobs import Wording
from anaphora.api.replies import TextCompletion
from anaphora.cache.keys import Tokens
from anaphora.errors import PromptError

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's own."""


_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[Count], Field(min_length=1)]
_OneText = Annotated[list[_Text], Field(min_length=1, max_length=1)]
_OneIds = Annotated[list[_Ids], Field(min_length=1, max_length=1)]


def _one_prompt(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError("several prompts in one request are not supported: send one")
        value = value[0]
    ids = isinstance(value, list) and all(_is_integer(item) for item in value)
    if not value or not (isinstance(value, str) or ids):
        raise ValueError("the prompt must be a text or a list of token ids, and not empty")
    return value


def _is_integer(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


class CompletionRequest(ChoicesBody):
    prompt: Annotated[
        str | list[Integer],
        BeforeValidator(_one_prompt, json_schema_input_type=_Text | _Ids | _OneText | _OneIds),
    ]
    """Text, which never becomes a control token, or token ids; a list of one of them."""
    best_of: Integer | None = None
    echo: Off = None
    logprobs: ColumnLogprobs | None = None
    suffix: Literal[""] | None = None

    @property
    def generation(self) -> Generation:
        choices = self.n or 1
        if self.best_of not in (None, choices):
            raise ApiError(
                f"best_of is {self.best_of}: all answers that are made are given, so leave it out "
                f"or use n, which is {choices}",
                param="best_of",
            )
        return Generation(
            self._prompt,
            _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            self.sampling,
            self.answer_grammar,
            logprobs=self.logprobs,
            choices=choices,
        )

    @property
    def _prompt(self) -> str | Tokens:
        if isinstance(self.prompt, str):
            return self.prompt
        try:
            return np.array(self.prompt, dtype=np.int32)
        except OverflowError as error:
            raise PromptError("the prompt has token ids that no model has") from error


def _whole(pieces: Sequence[Piece]) -> dict[str, Any]:
    return {"text": "".join(piece.text for piece in pieces if isinstance(piece, Text))}


def _piece(piece: Piece, calls: int) -> dict[str, Any]:
    return _whole([piece])


_FORM = Form(
    prefix="cmpl",
    kind="text_completion",
    chunk_kind="text_completion",
    whole=_whole,
    piece=_piece,
    first=None,
    last=_whole([]),
    logprobs=Wording.in_columns,
)


def router(api: Endpoint) -> APIRouter:
    routes = APIRouter()

    @routes.post(
        "/v1/completions",
        response_model=TextCompletion,
        openapi_extra=takes(CompletionRequest, "A `text_completion`; at the end `[DONE]`."),
    )
    async def create_completion(request: Request) -> Response:
        """What follows a raw prompt, in the protocol of OpenAI's Completions."""
        return await openai_choices.answer(api, request, CompletionRequest, _FORM)

    return routes
