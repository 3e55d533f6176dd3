"""Anthropic's rules of prompt caching, by its own client and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from anaphora import Model, Settings
from anaphora.api.anthropic_bodies import CountRequest
from anaphora.api.anthropic_diagnostics import Diagnostics, Fingerprint
from anaphora.api.endpoint import Options
from anaphora.api.serving import Serving
from anaphora.clock import ManualClock
from anaphora.engine.protocol import Found, Started
from anaphora.keys import KeyFile, Keys
from anaphora.roster import Choice, Roster
from tests.api.conftest import Serve, Server, issued, roster
from tests.conftest import TinyModel

Json = dict[str, Any]

MARK: Json = {"type": "ephemeral"}
HOUR: Json = {"type": "ephemeral", "ttl": "1h"}
RULES = Options(profile="anthropic")


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Server]:
    """By Anthropic's rules; the tests use texts of their own."""
    server = Server(Serving(roster([tiny_llama])), RULES)
    server.start()
    yield server
    server.stop()


def document(salt: str, tokens: int) -> str:
    """Some more tokens than that of the tiny model's, most of which are letters."""
    line = f"{salt}: a quick brown fox jumps over some lazy dog. "
    return (line * (1 + tokens // (len(line) - 8))).rstrip()


def text(words: str, mark: Json | None = None) -> Json:
    return {"type": "text", "text": words, "cache_control": mark}


def user(*blocks: Json | str) -> Json:
    return {"role": "user", "content": [text(b) if isinstance(b, str) else b for b in blocks]}


def assistant(*blocks: Json) -> Json:
    return {"role": "assistant", "content": list(blocks)}


def tool(name: str, mark: Json | None = None, about: str = "Look it up.") -> Json:
    schema = {"type": "object", "properties": {"at": {"type": "string"}}}
    return {"name": name, "description": about, "input_schema": schema, "cache_control": mark}


def body(*messages: Json, **members: Any) -> Json:
    return {"model": "any", "max_tokens": 1, "messages": list(messages) or [user("Hi")], **members}


def send(server: Server, request: Json, path: str = "/v1/messages", key: str = "") -> Any:
    return server.http().post(path, json=request, headers={"x-api-key": key} if key else {})


def post(server: Server, request: Json, key: str = "") -> Json:
    """The reply; its counters add up to what is counted without an answer."""
    response = send(server, request, key=key)
    assert response.status_code == 200, response.text
    reply: Json = response.json()
    usage = reply["usage"]
    split = usage["cache_creation"]
    assert sum(split.values()) == usage["cache_creation_input_tokens"]
    names = {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"}
    names |= {"cache_control", "speed"}
    counted = {name: value for name, value in request.items() if name in names}
    count = send(server, counted, "/v1/messages/count_tokens", key).json()["input_tokens"]
    parts = [usage[f"{name}input_tokens"] for name in ("", "cache_read_", "cache_creation_")]
    assert min(parts) >= 0
    assert sum(parts) == count
    return reply


def counters(usage: Json) -> tuple[int, int, int]:
    """Read, and written for an hour and for five minutes."""
    split = usage["cache_creation"]
    hour, minutes = (split[f"ephemeral_{ttl}_input_tokens"] for ttl in ("1h", "5m"))
    return usage["cache_read_input_tokens"], hour, minutes


def ask(server: Server, request: Json, key: str = "") -> tuple[int, int, int]:
    return counters(post(server, request, key)["usage"])


# Counters


def test_writes_end_at_breakpoints_and_are_read(server: Server) -> None:
    system = [text(document("plain", 1200), MARK)]
    read, hour, minutes = ask(server, body(user("One?"), system=system))
    assert (read, hour) == (0, 0)
    assert minutes > 1024
    second = post(server, body(user("A question that is another one?"), system=system))
    assert counters(second["usage"]) == (minutes, 0, 0)
    assert second["usage"]["input_tokens"] > 0
    unmarked = post(server, body(system=system[0]["text"]))["usage"]
    assert counters(unmarked) == (0, 0, 0), "a breakpoint is needed to read, too"


def test_a_hit_is_computed_once_only(server: Server) -> None:
    request = body(system=[text(document("computed", 1200), MARK)])
    cold, warm = (send(server, request) for _ in range(2))
    assert cold.json()["usage"]["cache_read_input_tokens"] == 0
    assert int(cold.headers["anaphora-computed-tokens"]) > 1024
    assert int(warm.headers["anaphora-computed-tokens"]) == 1, "also what counts as uncached"


def test_both_lifetimes_in_one_request(server: Server) -> None:
    system, talk = document("both", 1200), document("talk", 300)
    tools = [tool("look", HOUR)]
    request = body(
        user(text(talk, MARK), "And?"), system=[text(system, HOUR)], tools=tools, max_tokens=4
    )
    read, hour, minutes = ask(server, request)
    assert read == 0
    assert hour > 1200 > minutes > 300
    assert ask(server, request) == (hour + minutes, 0, 0)
    longer = [text(talk), text(talk, MARK)]
    read, *written = ask(server, body(user(*longer), system=[text(system, HOUR)], tools=tools))
    assert read == hour + minutes, "its end is not marked any more, and within reach"
    assert written[0] == 0 < written[1]


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client(server: Server, stream: bool) -> None:
    client = server.anthropic()
    request = body(
        system=[text(document(f"client {stream}", 1200), HOUR)],
        max_tokens=8,
        extra_body={"temperature": 0},
    )

    def reply() -> anthropic.types.Message:
        if not stream:
            return client.messages.create(**request)
        with client.messages.stream(**request) as events:
            return events.get_final_message()

    cold, warm = reply().usage, reply().usage
    assert cold.cache_creation is not None
    assert cold.cache_creation.ephemeral_1h_input_tokens == cold.cache_creation_input_tokens
    assert warm.cache_read_input_tokens == cold.cache_creation_input_tokens
    assert warm.input_tokens == cold.input_tokens > 0
    assert warm.cache_creation_input_tokens == cold.cache_read_input_tokens == 0
    whole = client.messages.create(**request).usage.model_dump()
    assert whole | warm.model_dump(exclude_unset=True) == whole


def test_a_stream_counts_at_its_start_and_never_adds(server: Server) -> None:
    request = body(system=[text(document("stream", 2000), MARK)], max_tokens=8)
    for warm in (False, True):
        first, *middle, delta, stop = raw_events(server, request)
        assert (first["type"], stop["type"]) == ("message_start", "message_stop")
        assert all(not event["type"].startswith("message_") for event in middle)
        begun = first["message"]["usage"]
        read, hour, minutes = counters(begun)
        assert (read > 2000, minutes > 2000) == (warm, not warm)
        assert hour == 0
        later = delta["usage"]
        assert later.pop("output_tokens") <= 8
        assert later == {name: begun[name] for name in later}
        assert "cache_creation" not in later
        assert all(type(count) is int for count in (*later.values(), begun["output_tokens"]))


def test_who_leaves_after_the_start_is_counted_once(serve: Serve) -> None:
    server = serve(options=RULES)
    request = body(system=[text(document("left", 2000), MARK)], max_tokens=500)
    with server.http().stream("POST", "/v1/messages", json={**request, "stream": True}) as stream:
        lines = stream.iter_lines()
        begun = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))
    usage = begun["message"]["usage"]
    assert server.metric("anaphora_cache_written_tokens_total") == counters(usage)[2]
    assert ask(server, {**request, "max_tokens": 1})[0] in (0, counters(usage)[2])


def raw_events(server: Server, request: Json) -> list[Json]:
    with server.http().stream("POST", "/v1/messages", json={**request, "stream": True}) as response:
        lines = response.iter_lines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def test_a_key_may_have_rules_of_its_own(serve: Serve, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    keys = {name: file.add(name, "acme", profile=name) for name in ("anthropic", "local")}
    keys["server's"] = file.add("none", "acme")
    server = serve(keys=Keys(tmp_path / "keys.json"))
    request = body(system=document("keys", 1200))
    marked = body(system=[text(document("keys", 1200), MARK)])
    assert ask(server, request, keys["anthropic"]) == (0, 0, 0)
    read, _, written = ask(server, request, keys["local"])
    assert read == 0 < written, "promises of one profile are none of another's"
    assert ask(server, request, keys["server's"]) == (written, 0, 0)
    assert 1024 < ask(server, marked, keys["anthropic"])[2] < written
    assert ask(server, marked, keys["anthropic"])[0] > 1024


def test_an_engine_in_a_process_of_its_own_has_the_same_rules(serve: Serve) -> None:
    server = serve(options=RULES, engine="process")
    request = body(system=[text(document("process", 1200), HOUR)], tools=[tool("look", HOUR)])
    read, hour, minutes = ask(server, request)
    assert (read, minutes) == (0, 0)
    assert hour > 1200
    assert ask(server, request) == (hour, 0, 0)


def test_local_counts_lifetimes_that_are_asked_for(serve: Serve) -> None:
    server = serve()
    request = body(system=[text(document("local", 300), HOUR)])
    read, hour, minutes = ask(server, request)
    assert read == 0
    assert hour > 300 > minutes > 0, "what nobody asked a lifetime for"
    assert ask(server, request) == (hour + minutes, 0, 0)


# Lifetimes


@pytest.fixture
def timed(tiny_llama: Path) -> Iterator[tuple[Server, ManualClock]]:
    clock = ManualClock()
    settings = Settings(cache_dir=None, memory_budget=64 << 20, threads=1)
    models = Roster([Choice("tiny", tiny_llama)], lambda path: Model(path, settings, clock))
    server = Server(Serving(models.__enter__()), RULES)
    server.start()
    yield server, clock
    server.stop()


def test_entries_end_unless_they_are_read(timed: tuple[Server, ManualClock]) -> None:
    server, clock = timed
    system = [text(document("system", 1200), HOUR)]
    request = body(user(text(document("talk", 300), MARK)), system=system)
    _, hour, minutes = ask(server, request)
    whole = hour + minutes
    for _ in range(3):
        clock.advance(299)
        assert ask(server, request) == (whole, 0, 0)
    clock.advance(301)
    assert ask(server, request) == (hour, 0, minutes)
    clock.advance(3601)
    assert ask(server, request) == (0, hour, minutes)


# What a prefix has to match on


def test_a_change_invalidates_its_level_and_those_behind(serve: Serve, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(NATIVE_TOOLS)
    server = serve(options=RULES, chat_template=template)
    tools = [tool("look", MARK, document("tools", 1200))]
    system, talk = [text(document("system", 200), MARK)], user(text(document("t", 200), MARK))

    def read(**changes: Any) -> int:
        request = {**body(talk, system=system, tools=tools), **changes}
        return ask(server, request)[0]

    assert read() == 0
    all_ = read()
    assert read(tool_choice={"type": "auto"}, thinking={"type": "disabled"}) == all_
    assert read(output_config={"effort": "high"}, speed="standard") == all_
    only_tools = read(system=[text(document("another", 200), MARK)])
    assert 0 < read(speed="fast") == only_tools
    of_system = read(tool_choice={"type": "none"})
    assert only_tools < of_system < all_
    assert read(thinking={"type": "enabled", "budget_tokens": 2000}) == of_system
    assert read(thinking={"type": "adaptive"}) == of_system
    assert read(output_config={"effort": "low"}) == of_system
    parallel = {"type": "auto", "disable_parallel_tool_use": True}
    assert read(tool_choice=parallel) == of_system
    web: Json = {"type": "web_search_20250305", "name": "web_search"}
    assert read(tools=[*tools, web]) == only_tools
    cited = {"type": "document", "source": {"type": "text", "data": "x"}}
    assert read(messages=[user({**cited, "citations": {"enabled": True}})]) == only_tools
    assert read(tools=[tool("look", MARK, document("tools!", 1200))]) == 0
    assert read() == all_


NATIVE_TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Shows tools before the system message."""


@pytest.mark.parametrize("native", [False, True])
def test_tools_that_change_are_not_read(serve: Serve, tmp_path: Path, native: bool) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(NATIVE_TOOLS)
    server = serve(options=RULES, chat_template=template if native else None)
    tools = [tool(name) for name in ("one", "two", "three")]
    system = [text(document("tools", 1200), MARK)]
    first = post(server, body(system=system, tools=tools, diagnostics=asking(None)))
    written = counters(first["usage"])[2]
    for changed in (
        [*tools[1:], tools[0]],
        [*tools, tool("four")],
        [
            {**tools[0], "input_schema": dict(reversed(tools[0]["input_schema"].items()))},
            *tools[1:],
        ],
    ):
        request = body(system=system, tools=changed, diagnostics=asking(first["id"]))
        second = post(server, request)
        assert counters(second["usage"])[0] == 0
        assert second["diagnostics"]["cache_miss_reason"] == {
            "type": "tools_changed",
            "cache_missed_input_tokens": written,
        }


# Where breakpoints fall


SEAMS = [
    (" The i", "nternational law"),
    ("\n", "\n\n"),
    ("123", "456"),
    ("a space ", "behind"),
    ("family 👩", "\u200d👩\u200d👧"),
    ("the end", "\n"),
]


@pytest.mark.parametrize(("before", "after"), SEAMS)
def test_a_breakpoint_inside_what_is_one_token(server: Server, before: str, after: str) -> None:
    words = document(f"seam {before!r}", 1200)
    alone = [text(words + before, MARK)]
    whole = [text(words + before + after, MARK)]
    parted = [text(words + before, MARK), text(after)]
    written = ask(server, body(system=alone))[2]
    assert written > 1024
    assert ask(server, body(system=whole))[0] == 0
    read, _, new = ask(server, body(system=parted))
    assert (read, new) in ((written, 0), (0, written - 1))
    if before == " The i":
        assert read == 0, "its last token is not the first one's"


def test_parts_of_one_text_are_read_by_the_local_rules_as_far_as_they_agree(serve: Serve) -> None:
    server = serve()
    words = document("seam", 1200)
    written = ask(server, body(system=[text(words + " The i", MARK)]))
    parted = body(system=[text(words + " The i", MARK), text("nternational law")])
    assert written[2] - 30 < ask(server, parted)[0] < written[2]


@pytest.mark.parametrize("count", [8, 9, 10, 12])
def test_a_wide_fan_out(server: Server, serve: Serve, count: int) -> None:
    system = [text(document(f"fan {count}", 1200), MARK)]
    start = user(text(document("start", 200), MARK))
    uses = [{"type": "tool_use", "id": f"t{n}", "name": "look", "input": {}} for n in range(count)]
    results: list[Json] = [
        {"type": "tool_result", "tool_use_id": use["id"], "content": "Found."} for use in uses
    ]
    results[-1]["cache_control"] = MARK
    first = body(start, system=system)
    second = body(user(document("start", 200)), assistant(*uses), user(*results), system=system)
    whole = ask(server, first)[2]
    read, _, written = ask(server, second)
    assert written > 0
    if count <= 9:  # the breakpoint is the first of 20 places, and there are two for each call
        assert read == whole
    else:
        assert 1024 < read < whole - 200
    local = serve()
    whole = sum(ask(local, first))
    assert ask(local, second)[0] > whole - 10, "all but the opening of the answer"


def test_every_kind_of_block_can_be_marked(server: Server) -> None:
    result: Json = {"type": "tool_result", "tool_use_id": "t", "content": "Blue."}
    use: Json = {"type": "tool_use", "id": "t", "name": "look", "input": {"at": "sky"}}
    search: Json = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": "x"}}
    found: Json = {"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "x"}
    searched: Json = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [found]}
    paper: Json = {"type": "document", "source": {"type": "text", "data": "A paper."}}
    sheets: Json = {"type": "content", "content": [text("A sheet.")]}
    quoted: Json = {"type": "search_result", "source": "s", "title": "t", "content": [text("Q.")]}
    opening = user(document("kinds", 1200))
    turns = [[opening, user(block)] for block in (text("Hi."), paper, quoted)]
    turns += [[opening, user({**paper, "source": sheets})]]
    turns += [[opening, assistant(search, searched), user("Go on.")]]
    turns += [[opening, assistant(use), user(result)]]
    for number, messages in enumerate(turns):
        for place in range(1, len(messages)):
            block = messages[place]["content"][-1]
            if messages[place]["role"] == "user" and block == text("Go on."):
                continue
            marked = [{**turn, "content": list(turn["content"])} for turn in messages]
            marked[place]["content"][-1] = {**block, "cache_control": MARK}
            request = body(*marked, system=f"Kind {number} {place}")
            written = ask(server, request)[2]
            assert written > 1024
            assert ask(server, request) == (written, 0, 0)


def test_a_mark_inside_a_result_counts_for_the_result(server: Server) -> None:
    def request(inner: Json | None, outer: Json | None) -> Json:
        result = {
            "type": "tool_result",
            "tool_use_id": "t",
            "content": [text("One.", inner), text("Two.")],
            "cache_control": outer,
        }
        use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        return body(user(document("inner", 1200)), assistant(use), user(result))

    written = ask(server, request(MARK, None))[2]
    assert ask(server, request(None, MARK)) == (written, 0, 0)
    assert sum(ask(server, request(HOUR, None))) == written


def test_the_top_level_marks_the_last_block_that_can_be(server: Server) -> None:
    words = document("top", 1200)
    top = body(user(words, "Last?"), cache_control=MARK)
    explicit = body(user(text(words), text("Last?", MARK)))
    written = ask(server, top)[2]
    assert ask(server, explicit) == (written, 0, 0)
    plain = body({"role": "user", "content": words + "string"}, cache_control=MARK)
    assert ask(server, plain)[2] > 1024
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    for last in (assistant(text("So."), thought), user("So.", text(""))):
        request = body(user(words, "And?"), last, cache_control=MARK)
        assert ask(server, request)[2] > 1024
    nothing = body(user(text("")), cache_control=MARK)
    assert ask(server, nothing) == (0, 0, 0)
    same = body(user(text(words + "same", MARK)), cache_control=MARK)
    assert ask(server, same)[2] > 1024


# Filling the cache


def test_pre_warming(server: Server) -> None:
    def fill(*blocks: Json) -> tuple[int, int, int]:
        reply = post(server, body(system=list(blocks), max_tokens=0))
        assert (reply["content"], reply["stop_reason"]) == ([], "max_tokens")
        assert reply["usage"]["output_tokens"] == 0
        return counters(reply["usage"])

    long = text(document("warm", 2000), MARK)
    written = fill(long)[2]
    assert written > 2000
    assert fill(long) == (written, 0, 0)
    assert ask(server, body(user("Now?"), system=[long])) == (written, 0, 0)
    assert fill(text(document("short", 300), MARK)) == (0, 0, 0)
    parts = text(document("first", 500), MARK), text(document("second", 700), MARK)
    written = fill(*parts)[2]
    assert written > 1200
    assert ask(server, body(system=[parts[0], text("Other.", MARK)])) == (0, 0, 0)
    assert fill(*parts) == (written, 0, 0)


@pytest.mark.parametrize(
    "members",
    [
        {"stream": True},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "look"}},
    ],
)
def test_what_pre_warming_cannot_be_combined_with(server: Server, members: Json) -> None:
    response = send(server, body(max_tokens=0, tools=[tool("look")], **members))
    refused(response)
    assert next(iter(members)) in response.text or "max_tokens" in response.text


# Refusals


def refused(response: Any) -> str:
    """The words of a refusal in the provider's shape."""
    assert response.status_code == 400, response.text
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["request_id"] == response.headers["request-id"]
    return str(error["error"]["message"])


ORDER = (
    ".cache_control.ttl: a ttl='1h' cache_control block must not come after a ttl='5m' "
    "cache_control block. Note that blocks are processed in the following order: `tools`, "
    "`system`, `messages`."
)
MARKED = text("x", MARK)
THOUGHT: Json = {"type": "thinking", "thinking": "x", "signature": "", "cache_control": MARK}
REDACTED: Json = {"type": "redacted_thinking", "data": "x", "cache_control": MARK}
TTL = ".cache_control.ephemeral.ttl: Input should be '5m' or '1h'"
EMPTY = ": cache_control cannot be set for empty text blocks"
EXTRA = ".cache_control: Extra inputs are not permitted"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            body(user(*[MARKED] * 5)),
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        (
            body(user(*[MARKED] * 4, "x"), cache_control=MARK),
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        (body(tools=[tool("a", MARK)], system=[text("x", HOUR)]), f"system.0{ORDER}"),
        (body(user(text("x", HOUR)), system=[MARKED]), f"messages.0.content.0{ORDER}"),
        (body(user(MARKED, "x"), cache_control=HOUR), f"messages.0.content.1{ORDER}"),
        (
            body(user(text("x", HOUR)), cache_control=MARK),
            "Top-level cache_control has ttl='5m' but the target block already has cache_control "
            "with ttl='1h'",
        ),
        (body(user("x", text("", MARK))), f"messages.0.content.1.text{EMPTY}"),
        (body(user("x"), assistant(THOUGHT)), f"messages.1.content.0.thinking{EXTRA}"),
        (
            body(user("x"), assistant(text("x"), REDACTED)),
            f"messages.1.content.1.redacted_thinking{EXTRA}",
        ),
        (body(system=[text("x", {**MARK, "ttl": "2h"})]), f"system.0{TTL}"),
        (body(system=[text("x", {**MARK, "ttl": None})]), f"system.0{TTL}"),
        (body(user(text("x", {**MARK, "ttl": 300}))), f"messages.0.content.0.text{TTL}"),
        (body(user(text("x", {**MARK, "ttl": ""}))), f"messages.0.content.0.text{TTL}"),
        (body(tools=[tool("a", {**MARK, "ttl": "9"})]), f"tools.0{TTL}"),
        (body(cache_control={**MARK, "ttl": "9"}), TTL[1:]),
        (
            body(system=[text("x", {"type": "persistent"})]),
            "system.0.cache_control: Input tag 'pers",
        ),
        (body(system=[text("x", {})]), "system.0.cache_control: "),
        (body(user(text("x", 5))), "messages.0.content.0.text.cache_control: "),  # type: ignore[arg-type]
        (body(user({"type": "image", "source": {}})), "messages.0.content.0: images, PDFs and"),
        (
            body(user("x", {"type": "document", "source": {"type": "url", "url": "x"}})),
            "messages.0.content.1: images, PDFs and",
        ),
        (
            body(user({"type": "container_upload", "file_id": "x"}), cache_control=MARK),
            "messages.0.content.0: images, PDFs and",
        ),
        (
            body(
                user(
                    {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]},
                )
            ),
            "messages.0.content.0.content.0: images, PDFs and",
        ),
        (
            body(user({"type": "image", "source": {}}, *[MARKED] * 5)),
            "A maximum of 4 blocks",  # validated first
        ),
    ],
)
def test_breakpoints_are_refused_in_the_providers_words(
    server: Server, path: str, request_: Json, message: str
) -> None:
    assert refused(send(server, request_, path)).startswith(message)


def test_the_client_raises_for_a_refusal(server: Server) -> None:
    client = server.anthropic()
    with pytest.raises(anthropic.BadRequestError, match="maximum of 4"):
        client.messages.create(**body(user(*[MARKED] * 5)))
    with pytest.raises(anthropic.BadRequestError, match="maximum of 4"):
        client.messages.create(**body(user(*[MARKED] * 5)), stream=True)


def test_both_places_of_a_wrong_order_are_named(server: Server) -> None:
    request = body(tools=[tool("a", MARK)], system=[text("x", HOUR)])
    assert refused(send(server, request)).endswith("tools.0.")


def test_lifetimes_in_the_right_order(server: Server) -> None:
    words = document("order", 1200)
    request = body(user(MARKED), system=[text(words, HOUR)], tools=[tool("a", HOUR)])
    read, hour, minutes = ask(server, request)
    assert (read, minutes > 0) == (0, True)
    assert hour > 1200


def test_odd_marks_that_are_none(server: Server) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x", "cache_control": None}
    thought = {**THOUGHT, "cache_control": None}
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    words = document("none", 1200)
    request = body(user(words), assistant(thought, use), user(result), cache_control=None)
    assert ask(server, request) == (0, 0, 0)
    assert ask(server, body(user(words, text("   ", MARK))))[2] > 1024, "it is not empty"


def test_unknown_members_of_a_mark_are_named_everywhere(server: Server) -> None:
    scoped = {**MARK, "scope": "global"}
    for members, path in (
        ({"system": [text("x", scoped)]}, "system.cache_control.scope"),
        ({"tools": [tool("a", scoped)]}, "tools.cache_control.scope"),
        ({"messages": [user(text("x", scoped))]}, "messages.content.cache_control.scope"),
        ({"cache_control": scoped}, "cache_control.scope"),
    ):
        response = send(server, {**body(), **members})
        assert response.status_code == 200
        assert response.headers["anaphora-ignored"] == path


# Diagnostics


def asking(previous: str | None) -> Json:
    return {"previous_message_id": previous}


def test_a_line_that_changes_with_every_request(server: Server) -> None:
    def request(x: str, previous: str | None) -> Json:
        line = f"x-version-header: cc_version=9.9.9; cc_entrypoint=cli; cch={x};"
        system = [text(line), text(document("billing", 3000), MARK)]
        return body(system=system, max_tokens=4, diagnostics=asking(previous))

    first = post(server, request("0d1e2", None))
    assert first["diagnostics"] is None
    written = counters(first["usage"])[2]
    second = post(server, request("f3a47", first["id"]))
    assert counters(second["usage"]) == (0, 0, written)
    reason = {"type": "system_changed", "cache_missed_input_tokens": written}
    assert second["diagnostics"] == {"cache_miss_reason": reason}
    third = post(server, request("f3a47", second["id"]))
    assert counters(third["usage"]) == (written, 0, 0)
    assert third["diagnostics"] is None


def test_every_state_of_diagnostics(server: Server) -> None:
    system = [text(document("states", 1200), MARK)]
    first = post(server, body(system=system, diagnostics=asking(None)))
    written = counters(first["usage"])[2]

    def state(previous: str | None = None, **changes: Any) -> Any:
        asked = asking(previous or first["id"])
        reply = post(server, {**body(system=system, diagnostics=asked), **changes})
        found = reply["diagnostics"]
        return found and found["cache_miss_reason"]

    assert state() is None
    assert state(messages=[user("Hi"), assistant(text("Ho")), user("So?")]) is None
    changed = state(messages=[user("Hey")])
    assert changed == {"type": "messages_changed", "cache_missed_input_tokens": 0}
    assert state(tools=[tool("a")])["type"] == "tools_changed"
    assert state(speed="fast")["type"] == "model_changed"
    other = state(system="Another.")
    assert other == {"type": "system_changed", "cache_missed_input_tokens": written}
    unavailable = {"type": "unavailable"}
    assert state(thinking={"type": "adaptive"}) == unavailable
    assert state(tool_choice={"type": "none"}, messages=[user("Hey")]) == unavailable
    assert state("msg_unknown") == {"type": "previous_message_not_found"}
    silent = post(server, body(system=system))
    assert silent["diagnostics"] is None
    assert state(silent["id"]) == {"type": "previous_message_not_found"}, "it did not ask for any"
    refused(send(server, body(diagnostics=asking(5))))  # type: ignore[arg-type]
    assert post(server, body(diagnostics=None))["diagnostics"] is None


def test_another_model_is_a_change(serve: Serve, tiny_model: TinyModel) -> None:
    paths = [tiny_model("llama", f32=True, seed=seed) for seed in (1, 2)]
    server = serve(options=RULES, paths=paths)
    one, two = ({**body(system=document("model", 1200)), "model": path.stem} for path in paths)
    first = post(server, {**one, "diagnostics": asking(None)})
    found = post(server, {**two, "diagnostics": asking(first["id"])})["diagnostics"]
    assert found["cache_miss_reason"]["type"] == "model_changed"
    again = post(server, {**one, "diagnostics": asking(first["id"])})
    assert again["diagnostics"] is None


def test_diagnostics_by_the_client_come_with_the_start_of_a_stream(server: Server) -> None:
    client = server.anthropic()
    system = [text(document("streamed", 1200), MARK)]

    def final(words: str, previous: str | None) -> Any:
        request = body(user(words), system=system, diagnostics=asking(previous))
        with client.messages.stream(**request) as events:
            first = next(iter(events))
            assert first.type == "message_start"
            final = events.get_final_message()
            assert final.diagnostics == first.message.diagnostics
            return final

    first = final("One?", None)
    assert first.diagnostics is None
    again = final("One?", first.id)
    assert again.diagnostics is None
    other = final("Two?", again.id)
    assert other.diagnostics is not None
    assert other.diagnostics.cache_miss_reason.type == "messages_changed"


def test_anothers_messages_are_not_found(serve: Serve, tmp_path: Path) -> None:
    keys, (one, two) = issued(tmp_path, "one", "two")
    server = serve(options=RULES, keys=keys)
    first = post(server, body(diagnostics=asking(None)), one)
    request = body(diagnostics=asking(first["id"]))
    assert post(server, request, one)["diagnostics"] is None
    missing = {"cache_miss_reason": {"type": "previous_message_not_found"}}
    assert post(server, request, two)["diagnostics"] == missing


def test_what_is_remembered_for_diagnostics_is_bounded() -> None:
    memory = Diagnostics(budget=2000)
    seen = Fingerprint.of(CountRequest.model_validate({"messages": [user("Hi")] * 10}))
    started = Started("", Found(), 10, 0, {})

    def compare(tenant: str, name: str, previous: str | None) -> Any:
        return memory.compare(tenant, name, "model", seen, started, previous)

    for number in range(4):
        compare("one", str(number), None)
    compare("two", "other", None)
    assert compare("one", "4", "3") is None
    assert compare("one", "5", "0") is not None
