"""Programs people use with servers like this one: LiteLLM, LangChain, and the ``llm`` command."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import DOCUMENT, Server

QUESTION = [
    {"role": "system", "content": DOCUMENT},
    {"role": "user", "content": "What time is it?"},
]
NEXT = [
    *QUESTION,
    {"role": "assistant", "content": "Thirteen."},
    {"role": "user", "content": "Are you sure?"},
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALLED = [
    *QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "look", "arguments": '{"at": "the clock"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "It is thirteen."},
]


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """These programs report home, or fetch lists, unless told not to."""
    settings = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
        "LANGSMITH_TRACING": "false",
        "LANGCHAIN_TRACING_V2": "false",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def litellm() -> Any:
    import litellm

    litellm.telemetry = False
    return litellm


# About its own code, when that is first used.
@pytest.mark.filterwarnings("ignore:Item .* on TypedDict:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:litellm.litellm_core_utils.*")
class TestLiteLLM:
    @pytest.fixture(params=["openai", "anthropic"])
    def options(self, server: Server, request: pytest.FixtureRequest) -> dict[str, Any]:
        url = f"{server.url}/v1" if request.param == "openai" else server.url
        return {
            "model": f"{request.param}/any",
            "api_base": url,
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 8,
            "num_retries": 0,
        }

    def test_a_conversation(self, litellm: Any, options: dict[str, Any]) -> None:
        first = litellm.completion(messages=QUESTION, **options)
        again = litellm.completion(messages=QUESTION, **options)
        assert first.choices[0].message.content == again.choices[0].message.content
        assert first.choices[0].finish_reason in ("stop", "length")
        prompt = again.usage.prompt_tokens
        assert again.usage.prompt_tokens_details.cached_tokens == prompt
        assert again.usage.total_tokens == prompt + again.usage.completion_tokens
        following = litellm.completion(messages=NEXT, **options)
        assert following.usage.prompt_tokens_details.cached_tokens >= prompt
        assert following.usage.prompt_tokens > prompt

    def test_streams(self, litellm: Any, options: dict[str, Any]) -> None:
        whole = litellm.completion(messages=QUESTION, **options)
        wanted = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(litellm.completion(messages=QUESTION, **wanted, **options))
        joined = litellm.stream_chunk_builder(chunks, messages=QUESTION)
        assert joined.choices[0].message.content == whole.choices[0].message.content
        assert joined.usage.prompt_tokens == whole.usage.prompt_tokens
        assert joined.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens

    def test_many_at_once(self, litellm: Any, options: dict[str, Any]) -> None:
        async def talk() -> list[Any]:
            asked = (litellm.acompletion(messages=QUESTION, **options) for _ in range(4))
            return await asyncio.gather(*asked)

        assert len({reply.choices[0].message.content for reply in asyncio.run(talk())}) == 1

    def test_tools_as_agents_send_them(self, litellm: Any, options: dict[str, Any]) -> None:
        wanted = {**options, "tools": [TOOL], "tool_choice": "auto"}
        first = litellm.completion(messages=QUESTION, **wanted)
        called = litellm.completion(messages=CALLED, **wanted)
        without = litellm.completion(messages=QUESTION, **options)
        assert first.usage.prompt_tokens > without.usage.prompt_tokens
        assert called.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
        assert called.choices[0].message.content is not None

    def test_errors_are_understood(self, litellm: Any, options: dict[str, Any]) -> None:
        with pytest.raises(litellm.BadRequestError, match="temperature"):
            litellm.completion(messages=QUESTION, **{**options, "temperature": -1})
        long = [{"role": "user", "content": DOCUMENT * 10}]
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(messages=long, **options)

    def test_responses(self, litellm: Any, server: Server) -> None:
        options: dict[str, Any] = {
            "model": "openai/any",
            "api_base": f"{server.url}/v1",
            "api_key": "none",
            "instructions": DOCUMENT,
            "input": "What time is it?",
            "max_output_tokens": 8,
            "temperature": 0,
        }
        first, again = (litellm.responses(**options) for _ in range(2))
        assert first.output_text == again.output_text
        details = again.usage.input_tokens_details
        assert details.cached_tokens == again.usage.input_tokens


class TestLangChain:
    @pytest.fixture(params=["chat", "responses", "messages"])
    def model(self, server: Server, request: pytest.FixtureRequest) -> Any:
        options: dict[str, Any] = {"model": "any", "max_tokens": 8, "max_retries": 0}
        if request.param == "messages":
            from langchain_anthropic import ChatAnthropic

            return ChatAnthropic(base_url=server.url, api_key="none", top_k=1, **options)
        from langchain_openai import ChatOpenAI

        responses = request.param == "responses"
        return ChatOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            temperature=0,
            use_responses_api=responses,
            stream_usage=True,
            **options,
        )

    def test_a_conversation(self, model: Any) -> None:
        first, again = (model.invoke(QUESTION) for _ in range(2))
        assert first.text == again.text
        usage = again.usage_metadata
        assert usage["input_token_details"]["cache_read"] == usage["input_tokens"] > 0
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        following = model.invoke(NEXT)
        details = following.usage_metadata["input_token_details"]
        assert details["cache_read"] >= usage["input_tokens"]

    def test_streams(self, model: Any) -> None:
        whole = model.invoke(QUESTION)
        first, *rest = model.stream(QUESTION)
        for chunk in rest:
            first += chunk
        assert first.text == whole.text
        usage = first.usage_metadata
        assert usage["input_token_details"]["cache_read"] == usage["input_tokens"]
        assert usage["output_tokens"] == whole.usage_metadata["output_tokens"]

    def test_tools_as_agents_send_them(self, model: Any) -> None:
        agent = model.bind_tools([TOOL], tool_choice="auto")
        first, called = agent.invoke(QUESTION), agent.invoke(CALLED)
        assert first.tool_calls == []
        prompt = first.usage_metadata["input_tokens"]
        assert prompt > model.invoke(QUESTION).usage_metadata["input_tokens"]
        assert called.usage_metadata["input_token_details"]["cache_read"] >= prompt


class TestLlm:
    """The ``llm`` command, with its own way to name a server."""

    @pytest.fixture
    def llm(self, server: Server, tmp_path: Path) -> Callable[..., str]:
        """``llm(arguments...)``: what the command prints."""
        models = [
            {"model_id": "local", "supports_tools": True},
            {"model_id": "new", "responses": True},
            {"model_id": "raw", "completion": True},
        ]
        shared = {"model_name": "any", "api_base": f"{server.url}/v1"}
        # JSON is YAML.
        text = json.dumps([{**model, **shared} for model in models])
        (tmp_path / "extra-openai-models.yaml").write_text(text)
        env = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}

        def run(*arguments: str) -> str:
            options = ("-o", "temperature", "0", "-o", "max_tokens", "8")
            command = [sys.executable, "-m", "llm", "prompt", *arguments, *options]
            done = subprocess.run(command, env=env, capture_output=True, check=False)
            assert done.returncode == 0, done.stderr.decode()
            return done.stdout.decode() + done.stderr.decode()

        return run

    @pytest.mark.parametrize("model", ["local", "new", "raw"])
    def test_a_prompt(self, llm: Callable[..., str], model: str) -> None:
        streamed = llm("-m", model, DOCUMENT)
        whole = llm("-m", model, DOCUMENT, "--no-stream", "--usage")
        assert whole.startswith(streamed)
        if model != "raw":  # of which it shows no usage
            prompt, cached = usage(whole)
            assert cached == prompt > 0

    def test_a_conversation_with_tools(self, llm: Callable[..., str]) -> None:
        look = 'def look(at: str) -> str:\n    "Look it up."\n    return at'
        wanted = ("--usage", "--functions", look)
        first = llm("-m", "local", "-s", DOCUMENT, "What time is it?", *wanted)
        second = llm("-c", "Are you sure?", *wanted)
        assert usage(second)[1] >= usage(first)[0]


def usage(shown: str) -> tuple[int, int]:
    """Tokens of the prompt, and those of them that were cached, as ``llm`` shows them."""
    (prompt,) = re.findall(r"Token usage: ([0-9,]+) input", shown)
    cached = re.search(r'"cached_tokens": ([0-9]+)', shown)
    return int(prompt.replace(",", "")), int(cached[1]) if cached else 0
