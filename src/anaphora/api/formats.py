"""What OpenAI's protocols say about the form of an answer: text, JSON, or a grammar.

Besides the provider's own forms there are ``regex``, ``lark`` and ``gbnf``.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from blake3 import blake3
from pydantic import Field

from anaphora.api.edge import Body
from anaphora.engine.protocol import Grammar


class TextFormat(Body):
    type: Literal["text"]

    @property
    def grammar(self) -> Grammar | None:
        return None


class JsonObjectFormat(Body):
    type: Literal["json_object"]

    @property
    def grammar(self) -> Grammar | None:
        return Grammar("json_object")


class JsonSchema(Body):
    name: str
    """The model is not told, nor the description."""
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None
    """Answers fit the schema in any case."""


class JsonSchemaFormat(Body):
    """A schema as Chat Completions have it."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    @property
    def grammar(self) -> Grammar | None:
        return Grammar.json_schema(self.json_schema.schema_)


class FlatJsonSchemaFormat(JsonSchema):
    """The same as Responses have it."""

    type: Literal["json_schema"]

    @property
    def grammar(self) -> Grammar | None:
        return Grammar.json_schema(self.schema_)


class RegexFormat(Body):
    type: Literal["regex"]
    regex: str

    @property
    def grammar(self) -> Grammar | None:
        return Grammar("regex", self.regex)


class GrammarFormat(Body):
    type: Literal["lark", "gbnf"]
    text: str = Field(alias="grammar")

    @property
    def grammar(self) -> Grammar | None:
        return Grammar(self.type, self.text)


_Others = TextFormat | JsonObjectFormat | RegexFormat | GrammarFormat
ChatFormat = Annotated[_Others | JsonSchemaFormat, Field(discriminator="type")]
ResponsesFormat = Annotated[_Others | FlatJsonSchemaFormat, Field(discriminator="type")]
Format = _Others | JsonSchemaFormat | FlatJsonSchemaFormat

TEXT = TextFormat(type="text")
"""What holds where nothing is said."""


def echoed(form: Format) -> dict[str, Any]:
    """``form`` as it was sent."""
    return form.model_dump(by_alias=True, exclude_unset=True)


def matched(form: Format) -> str:
    """What prefixes of prompts have to match on: the form with its schema, in few letters."""
    if isinstance(form, TextFormat):
        return form.type
    return f"{form.type} {blake3(json.dumps(echoed(form)).encode()).hexdigest(length=16)}"
