"""Structured output on all three protocols, by the official clients."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from anaphora.api import formats
from anaphora.api.formats import FlatJsonSchemaFormat, TextFormat
from anaphora.profiles.openai import Conditions
from tests.api.conftest import Server
from tests.engine.test_grammar import COSTLY

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "größer"]},
        "years": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 2},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}
SCHEMA["properties"]["years"]["items"]["minimum"] = 0
QUESTION: list[Any] = [{"role": "user", "content": "Which city?"}]
CHAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
FLAT = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
LIMIT = 500
PLACES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


class City(BaseModel):
    """Without a text, whose bound Anthropic's client would leave out of the schema."""

    name: Literal["Rome", "Kraków"]
    size: Literal["small", "large"]


def chat(server: Server, stream: bool, form: Any, **options: Any) -> str:
    given: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": LIMIT, **options}
    client = server.openai().chat.completions
    if not stream:
        (choice,) = client.create(**given, response_format=form).choices
        assert choice.finish_reason == "stop"
        return choice.message.content or ""
    chunks = list(client.create(**given, response_format=form, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def responses(server: Server, stream: bool, form: Any, **options: Any) -> str:
    given = {"model": "tiny", "input": QUESTION, "max_output_tokens": LIMIT, **options}
    client: Any = server.openai().responses
    answer = client.create(**given, text={"format": form}, stream=stream)
    if not stream:
        assert answer.status == "completed"
        assert answer.text.format.model_dump(by_alias=True, exclude_unset=True) == form
        return str(answer.output_text)
    events = list(answer)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == text
    assert events[-1].type == "response.completed"
    return text


def messages(server: Server, stream: bool, form: Any, **options: Any) -> str:
    # This client has no parameter for a temperature any more.
    given = {"model": "tiny", "messages": QUESTION, "max_tokens": LIMIT, "extra_body": options}
    client: Any = server.anthropic().messages
    if not stream:
        message = client.create(**given, output_config={"format": form})
    else:
        with client.stream(**given, output_config={"format": form}) as events:
            text = "".join(events.text_stream)
            message = events.get_final_message()
        assert message.content[0].text == text
    assert message.stop_reason == "end_turn"
    return str(message.content[0].text)


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize(
    ("ask", "form"),
    [
        (chat, CHAT),
        (responses, FLAT),
        (messages, {"type": "json_schema", "schema": SCHEMA}),
        (chat, {**CHAT, "json_schema": {"name": "city", "schema": SCHEMA, "strict": False}}),
    ],
)
def test_answers_fit_their_schema(
    server: Server, ask: Callable[..., str], form: Any, temperature: float
) -> None:
    texts = [ask(server, stream, form, temperature=temperature) for stream in (False, True)]
    assert all(Draft202012Validator(SCHEMA).is_valid(json.loads(text)) for text in texts)
    if temperature == 0:
        assert texts[0] == texts[1]


@pytest.mark.parametrize("ask", [chat, responses])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "regex", "regex": "[a-z]{4}é?"}, "[a-z]{4}é?"),
        ({"type": "lark", "grammar": 'start: "a".."e" "1"'}, "[a-e]1"),
        ({"type": "gbnf", "grammar": 'root ::= "ü" ("no" | "yes")'}, "ü(no|yes)"),
    ],
)
def test_grammars_of_ones_own(
    server: Server, ask: Callable[..., str], stream: bool, form: Any, pattern: str
) -> None:
    options: dict[str, Any] = {}
    if ask is responses:  # whose client reads what it gets back into types it has
        http = server.http()
        body = {"input": QUESTION, "text": {"format": form}, "stream": stream}
        reply = http.post("/v1/responses", json=body)
        text = re.findall(r'"text":\s*("(?:[^"\\]|\\.)*")', reply.text)[-1]
        assert re.fullmatch(pattern, json.loads(text))
    else:
        assert re.fullmatch(pattern, ask(server, stream, form, **options))


def test_any_json_object(server: Server) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "seed": 1, "max_tokens": 900}
    given["response_format"] = {"type": "json_object"}
    (choice,) = server.openai().chat.completions.create(**given).choices
    text = choice.message.content or ""
    assert text[0] == "{"
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_gbnf_as_llama_cpps_server_takes_it(server: Server, path: str) -> None:
    words = {"messages": QUESTION} if "chat" in path else {"prompt": "Which?"}
    body = {**words, "grammar": 'root ::= "yes" | "no"', "max_tokens": 20}
    (choice,) = server.http().post(path, json=body).json()["choices"]
    assert choice.get("text", choice.get("message", {}).get("content")) in ("yes", "no")
    assert choice["finish_reason"] == "stop"


def test_the_clients_own_ways_to_ask_for_a_type(server: Server) -> None:
    openai, anthropic = server.openai(), server.anthropic()
    given: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": LIMIT}
    completion = openai.chat.completions.parse(**given, response_format=City)
    assert isinstance(completion.choices[0].message.parsed, City)
    response = openai.responses.parse(
        model="tiny", input=QUESTION, max_output_tokens=LIMIT, text_format=City
    )
    assert isinstance(response.output_parsed, City)
    message = anthropic.messages.parse(**given, output_format=City)
    assert isinstance(message.parsed_output, City)


def form_on(path: str, schema: Any) -> dict[str, Any]:
    """The members of a request that ask for JSON of ``schema``."""
    match path:
        case "/v1/chat/completions":
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            return {"messages": QUESTION, "max_tokens": 5, "response_format": form}
        case "/v1/responses":
            form = {"type": "json_schema", "name": "x", "schema": schema}
            return {"input": QUESTION, "max_output_tokens": 5, "text": {"format": form}}
    form = {"type": "json_schema", "schema": schema}
    return {"messages": QUESTION, "max_tokens": 5, "output_config": {"format": form}}


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "wizard"}, "wizard"),
        ({"$ref": "#"}, "recursive"),
        ({"type": "string", "pattern": "("}, "unclosed"),
        ({"if": {}, "then": {}}, "if"),
        ({"const": "x" * 70_000}, "longer"),
        ([], "dictionary"),
    ],
)
def test_bad_schemas_are_refused_in_the_protocols_shape(
    server: Server, path: str, stream: bool, schema: Any, word: str
) -> None:
    response = server.http().post(path, json={**form_on(path, schema), "stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert word in error["message"]


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"response_format": {"type": "regex"}},
        {"response_format": {"type": "regex", "regex": "("}},
        {"response_format": {"type": "lark", "grammar": "start: nothing"}},
        {"response_format": {"type": "gbnf", "grammar": ""}},
        {"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'},
        {"grammar": 5},
    ],
)
def test_bad_forms_are_refused(server: Server, options: dict[str, Any]) -> None:
    body = {"messages": QUESTION, "max_tokens": 5, **options}
    response = server.http().post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_grammar_that_runs_into_a_limit_ends_the_answer_with_an_error(server: Server) -> None:
    form = {"type": "regex", "regex": COSTLY}
    vocabulary = server.model.vocabulary
    bias = {str(token): 1000 for token in vocabulary.encode("a!b")}
    bias |= {str(token): -1000 for token in vocabulary.end_of_generation}
    body = {"messages": QUESTION, "max_tokens": 900, "response_format": form, "logit_bias": bias}
    whole = server.http().post("/v1/chat/completions", json=body)
    assert whole.status_code == 400
    assert "simpler" in whole.json()["error"]["message"]
    streamed = server.http().post("/v1/chat/completions", json={**body, "stream": True})
    assert streamed.status_code == 200
    assert "simpler" in streamed.text.splitlines()[-2]
    assert chat(server, False, {"type": "regex", "regex": "a"}) == "a"


def test_a_form_is_matched_by_all_that_is_in_it() -> None:
    other = {**SCHEMA, "required": []}
    keys = [
        formats.matched(FlatJsonSchemaFormat.model_validate({**FLAT, "schema": schema}))
        for schema in (SCHEMA, SCHEMA, other)
    ]
    assert keys[0] == keys[1] != keys[2]
    assert formats.matched(TextFormat(type="text")) == Conditions().text_format
