"""Tenants: what they may see of each other, which is nothing, and what they may share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from anaphora.keys import KeyFile, Keys
from tests.api.conftest import DOCUMENT, Serve, Server
from tests.api.test_openai_chat import wait_until_settled
from tests.test_model import opened
from tests.tiny_models import CONTROL, VOCABULARY

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
GOES_ON = {str(VOCABULARY.index(token)): -100 for token in CONTROL}
"""A bias under which no answer ends by itself."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What a request cost, in tokens."""

    prompt: int
    read: int
    computed: int
    id: str = ""
    text: str = ""

    @property
    def cold(self) -> bool:
        """Whether nothing was read but, maybe, the template's opening of every prompt."""
        return self.read < 32 and self.computed == self.prompt - self.read


@dataclass(frozen=True)
class House:
    """A server with keys."""

    server: Server
    keys: KeyFile
    issued: dict[str, str]
    """A key of each tenant."""

    def post(self, tenant: str, path: str, body: Json) -> httpx.Response:
        return self.server.http().post(path, json=body, headers={"x-api-key": self.issued[tenant]})

    def get(self, tenant: str, path: str) -> httpx.Response:
        return self.server.http().get(path, headers={"x-api-key": self.issued[tenant]})

    def chat(self, tenant: str, *messages: Json, **body: Any) -> Asked:
        response = self.post(tenant, CHAT, {"messages": messages, "max_tokens": 1, **body})
        assert response.status_code == 200, response.text
        reply = response.json()
        return Asked(
            reply["usage"]["prompt_tokens"],
            reply["usage"]["prompt_tokens_details"]["cached_tokens"],
            int(response.headers["anaphora-computed-tokens"]),
            reply["id"],
            reply["choices"][0]["message"]["content"],
        )

    def msg(self, tenant: str, user: str, **body: Any) -> Asked:
        wanted = {"messages": [{"role": "user", "content": user}], "max_tokens": 1, **body}
        response = self.post(tenant, MESSAGES, {"model": "any", **wanted})
        assert response.status_code == 200, response.text
        reply = response.json()
        read = reply["usage"]["cache_read_input_tokens"]
        rest = reply["usage"]["input_tokens"] + reply["usage"]["cache_creation_input_tokens"]
        computed = int(response.headers["anaphora-computed-tokens"])
        return Asked(read + rest, read, computed, reply["id"])

    def metrics(self, tenant: str) -> dict[tuple[str, str], float]:
        """Sums by name and tenant."""
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(self.get(tenant, "/metrics").text):
            for sample in family.samples:
                key = sample.name, sample.labels.get("tenant", "nobody's")
                found[key] = found.get(key, 0) + sample.value
        return found


Open = Callable[..., House]


@pytest.fixture
def open_house(serve: Serve, tmp_path: Path) -> Open:
    """``open_house(tenant, ...)``: a server with a key for each, and one called root's."""

    def open_(*tenants: str, shared: dict[str, str] | None = None, **settings: Any) -> House:
        file = KeyFile(tmp_path / "keys.json")
        known = {record.name for record in file.records()}
        issued = {name: file.add(name) for name in tenants if name not in known}
        if "root" not in known:
            issued["root"] = file.add("root", operator=True)
        for tenant, namespace in (shared or {}).items():
            file.share(tenant, namespace)
        return House(serve(keys=Keys(file.path), **settings), file, issued)

    return open_


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def system(text: str) -> Json:
    return {"role": "system", "content": text}


def answered(text: str) -> Json:
    return {"role": "assistant", "content": text}


class TestAnothersCache:
    """Another tenant's cache: by time, by borrowed salt, by ambiguous key, by monitoring.

    Time is judged by the work: all tokens of the prompt are computed.
    """

    def document(self, salt: object) -> str:
        return f"{salt} {DOCUMENT * 2}"

    def test_what_another_tenant_sent_is_cold(self, open_house: Open) -> None:
        house = open_house("one", "two")
        for number in range(1000, 1020):
            text = user(self.document(number))
            warmed = house.chat("one", text)
            assert warmed.prompt > 2500
            assert house.chat("two", text).cold
            hit = house.chat("one", text)
            assert (hit.read, hit.computed) == (hit.prompt, 1)
            again = house.chat("two", text)
            assert (again.read, again.computed) == (again.prompt, 1)

    def test_nothing_a_client_says_opens_anothers_cache(self, open_house: Open) -> None:
        house = open_house("one", "two")
        borrowed: list[Json] = [
            {"prompt_cache_key": "team"},
            {"user": "one"},
            {"metadata": {"tenant": "one", "user": "one"}},
            {"cache_salt": "c2FsdA=="},
            {"safety_identifier": "one", "organization": "one"},
        ]
        borrowed.append({name: value for members in borrowed for name, value in members.items()})
        for number, members in enumerate(borrowed):
            text = user(self.document(f"chat {number}"))
            house.chat("one", text, **members)
            assert house.chat("two", text, **members).cold
            assert house.chat("one", text, **members).read > 0
        for number, members in enumerate([{}, {"metadata": {"user_id": "one"}}]):
            document = self.document(f"msg {number}")
            block = {"type": "text", "text": document, "cache_control": {"type": "ephemeral"}}
            house.msg("one", "Hi", system=[block], **members)
            assert house.msg("two", "Hi", system=[block], **members).cold
            assert house.msg("one", "Hi", system=[block], **members).read > 0

    def test_headers_open_nothing_either(self, open_house: Open) -> None:
        house = open_house("one", "two")
        body = {"messages": [user(self.document("headers"))], "max_tokens": 1}
        house.post("one", CHAT, body)
        named = {"x-tenant": "one", "openai-organization": "one", "x-forwarded-user": "one"}
        keys = {"x-api-key": house.issued["two"], **named}
        usage = house.server.http().post(CHAT, json=body, headers=keys).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0

    @pytest.mark.parametrize(
        "reference", ["previous_message_id", "comparison_response_id", "previous_response_id"]
    )
    def test_anothers_ids_are_like_unknown_ones(self, open_house: Open, reference: str) -> None:
        house = open_house("one", "two")
        text = self.document("ids")
        known = house.msg("one", "Hi", system=text).id
        if reference != "previous_message_id":
            known = house.post("one", RESPONSES, {"input": text, "store": False}).json()["id"]

        def outcome(salt: str, named: str) -> tuple[object, ...]:
            """What two is answered, apart from what every answer has of its own."""
            path, system = RESPONSES, self.document(salt)
            body: Json = {"input": "Hi", "max_output_tokens": 16}
            if reference == "previous_message_id":
                path, body = MESSAGES, {"max_tokens": 1, "messages": [user("Hi")]}
                body["diagnostics"] = {reference: named}
            elif reference == "comparison_response_id":
                body["prompt_cache_options"] = {reference: named}
            else:
                body[reference] = named
            body |= {"model": "any", "system" if path == MESSAGES else "instructions": system}
            response = house.post("two", path, body)
            reply = response.json()
            return (
                response.status_code,
                str(reply.get("error")).replace(named, "ID"),
                {name: n for name, n in reply.get("usage", {}).items() if "input" in name},
                reply.get("diagnostics"),
                reply.get("prompt_cache_diagnostics"),
                response.headers.get("anaphora-computed-tokens"),
                response.headers.get("anaphora-ignored"),
            )

        outcome("u", known)  # from here on two has the template's opening in its own cache
        assert outcome("v", known) == outcome("w", known[:-6] + "abcdef")

    def test_names_and_keys_that_join_to_the_same_text_never_meet(self, open_house: Open) -> None:
        house = open_house("acme", "acme4", "acme42")
        keys: dict[str, Json] = {
            "acme": {"prompt_cache_key": "42"},
            "acme4": {"prompt_cache_key": "2"},
            "acme42": {},
        }
        for first in keys:
            text = user(self.document(f"warmed by {first}"))
            house.chat(first, text, **keys[first])
            for other in keys.keys() - {first}:
                assert house.chat(other, text, **keys[other]).cold
            assert house.chat(first, text, **keys[first]).read > 0

    def test_nothing_that_is_shown_tells_of_another_tenant(self, open_house: Open) -> None:
        house = open_house("curious", "secretive")
        asked = house.chat("secretive", user(self.document("Confidential")))
        house.chat("curious", user("Hi"))
        http = house.server.http()
        shown = [house.get("curious", path).text for path in ("/metrics", "/v1/models")]
        shown += [http.get(path).text for path in ("/health", "/openapi.json", "/", "/stats")]
        for path in ("/metrics", "/v1/models", "/stats"):
            nobodys = http.get(path)
            assert nobodys.status_code in (401, 404)
            shown.append(nobodys.text)
        for text in shown:
            for telling in ("secretive", "Confidential", asked.id):
                assert telling not in text
        assert {owner for _, owner in house.metrics("curious")} == {"curious"}


class TestMetrics:
    def test_a_tenant_sees_its_own_series_and_an_operator_all(self, open_house: Open) -> None:
        house = open_house("one", "two")
        asked = [house.chat("one", user(DOCUMENT)) for _ in range(2)]
        other = house.chat("two", user("Hi"))
        everything = house.metrics("root")
        for name, values in {
            "anaphora_prompt_tokens_total": [a.prompt for a in asked],
            "anaphora_cache_read_tokens_total": [a.read for a in asked],
            "anaphora_cache_written_tokens_total": [a.prompt - a.read for a in asked],
            "anaphora_cache_found_tokens_total": [a.prompt - a.computed for a in asked],
            "anaphora_computed_tokens_total": [a.computed for a in asked],
            "anaphora_request_seconds_count": [1, 1],
            "anaphora_requests_running": [0],
            "anaphora_requests_waiting": [0],
            "anaphora_http_requests_total": [1, 1],
        }.items():
            assert everything[name, "one"] == sum(values), name
        assert everything["anaphora_prompt_tokens_total", "two"] == other.prompt
        assert everything["anaphora_model_info", "nobody's"] == 1
        assert any(name.startswith("process_") for name, _ in everything)

        for tenant in ("one", "two"):
            own = house.metrics(tenant)
            assert {owner for _, owner in own} == {tenant}
            expected = everything["anaphora_prompt_tokens_total", tenant]
            assert own["anaphora_prompt_tokens_total", tenant] == expected

    def test_whoever_asked_nothing_yet_sees_nothing(self, open_house: Open) -> None:
        house = open_house("one", "two")
        house.chat("one", user("Hi"))
        assert house.metrics("two") == {}

    def test_refused_requests_count_for_nobody(self, open_house: Open) -> None:
        house = open_house("one")
        assert house.server.http().get("/v1/models").status_code == 401
        name = "anaphora_http_requests_total"
        assert house.metrics("root")[name, ""] == 1
        assert (name, "") not in house.metrics("one")

    def test_requests_in_flight_count_for_their_tenant(self, open_house: Open) -> None:
        house = open_house("one", "two")
        body = {"messages": [user("Hi")], "stream": True, "logit_bias": GOES_ON}
        headers = {"x-api-key": house.issued["one"]}
        with house.server.http().stream("POST", CHAT, json=body, headers=headers) as response:
            lines = response.iter_lines()
            next(line for line in lines if '"delta"' in line)
            assert house.metrics("root")["anaphora_requests_running", "one"] == 1
            assert ("anaphora_requests_running", "one") not in house.metrics("two")

    def test_given_keys_are_operators(self, serve: Serve, tmp_path: Path) -> None:
        server = serve(keys=Keys(tmp_path / "keys.json", ["given"]))
        shown = server.http().get("/metrics", headers={"x-api-key": "given"}).text
        assert "process_" in shown

    def test_without_keys_everybody_sees_everything(self, server: Server) -> None:
        shown = server.http().get("/metrics").text
        assert "process_" in shown
        assert "anaphora_model_info" in shown


RULES = "You sell books. " + DOCUMENT


class TestSharing:
    """A namespace that tenants may join, to compute common tools and system prompts once."""

    def test_members_compute_a_system_prompt_once_and_share_nothing_else(
        self, open_house: Open
    ) -> None:
        members = {"one": "house", "two": "house", "elsewhere": "other"}
        house = open_house("one", "two", "elsewhere", "alone", shared=members)
        question = user("Where is the poetry?")
        first = house.chat("one", system(RULES), question)
        assert first.cold

        second = house.chat("two", system(RULES), user("How late is it?"))
        assert second.computed == second.prompt - second.read
        model = house.server.model
        tokens = model.render([system(RULES), question]).tokens[: second.read]
        text = b"".join(model.vocabulary.piece(int(token)) for token in tokens).decode()
        assert text == f"system\n{RULES}\nuser\n", "not a word of anybody's question"

        same = house.chat("two", system(RULES), question)
        assert same.read == second.read, "what one asked stays its own"
        assert same.computed == same.prompt - same.read
        again = house.chat("one", system(RULES), question)
        assert (again.read, again.computed) == (again.prompt, 1)

        assert house.chat("alone", system(RULES), question).cold
        assert house.chat("elsewhere", system(RULES), question).cold
        assert house.chat("two", system("Another. " + RULES), question).read < 64

    def test_the_answer_and_later_turns_stay_with_their_tenant(self, open_house: Open) -> None:
        house = open_house("one", "two", shared={"one": "house", "two": "house"})
        begun = [system(RULES), user("Where is the poetry?")]
        reply = house.chat("one", *begun, max_tokens=40, logit_bias=GOES_ON)
        turn = [*begun, answered(reply.text)]
        ready = opened(house.server.model, turn)
        wait_until_settled(house.server)
        following = house.chat("one", *turn, user("And now?"), max_tokens=0)
        assert following.read >= ready
        assert following.computed == following.prompt - ready
        other = house.chat("two", *turn, user("And now?"), max_tokens=0)
        trunk = house.chat("two", system(RULES), user("How late is it?")).read
        assert (other.read, other.computed) == (trunk, other.prompt - trunk)

    def test_tools_are_shared_too(self, open_house: Open) -> None:
        house = open_house("one", "two", "alone", shared={"one": "house", "two": "house"})
        described = {"name": "look", "description": "Looks. " * 60, "parameters": {}}
        tools = [{"type": "function", "function": described}]
        assert house.chat("one", user("Where?"), tools=tools).cold
        assert house.chat("two", user("How?"), tools=tools).read > 300
        assert house.chat("alone", user("How?"), tools=tools).cold

    def test_all_protocols_share_one_beginning(self, open_house: Open) -> None:
        house = open_house("one", "two", shared={"one": "house", "two": "house"})
        house.chat("one", system(RULES), user("Where?"))
        read = house.msg("two", "How?", system=RULES).read
        assert read > 1000
        body = {"instructions": RULES, "input": "Why?", "max_output_tokens": 16}
        usage = house.post("two", RESPONSES, body).json()["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == read

    def test_without_tools_or_a_system_prompt_nothing_is_shared(self, open_house: Open) -> None:
        house = open_house("one", "two", shared={"one": "house", "two": "house"})
        late = [user(DOCUMENT), answered("Yes."), system("Be brief."), user("Why?")]
        for messages in ([user(DOCUMENT)], late):
            house.chat("one", *messages)
            assert house.chat("one", *messages).read > 0
        assert house.chat("two", *late).cold
        raw = {"prompt": f"<|im_start|>system\n{RULES}", "max_tokens": 1}
        for tenant, warm in (("one", False), ("one", True), ("two", False)):
            usage = house.post(tenant, "/v1/completions", raw).json()["usage"]
            assert bool(usage["prompt_tokens_details"]["cached_tokens"]) == warm

    def test_it_lasts_over_a_restart(self, open_house: Open, tmp_path: Path) -> None:
        folder = tmp_path / "cache"
        members = {"one": "house", "two": "house"}
        before = open_house("one", "two", "alone", shared=members, cache_dir=folder)
        before.chat("one", system(RULES), user("Where?"))
        before.server.stop()
        after = House(open_house(cache_dir=folder).server, before.keys, before.issued)
        second = after.chat("two", system(RULES), user("How?"))
        assert second.read > 1000
        assert second.computed == second.prompt - second.read
        assert after.chat("alone", system(RULES), user("How?")).cold

    def test_joining_and_leaving_count_at_once(self, open_house: Open) -> None:
        house = open_house("one", "two", shared={"one": "house"})
        house.chat("one", system(RULES), user("Where?"))
        assert house.chat("two", system(RULES), user("How?")).cold
        house.keys.share("two", "house")
        assert house.chat("two", system(RULES), user("How?")).read > 1000
        house.keys.unshare("one")
        assert house.chat("one", system(RULES), user("Where?")).cold

    def test_an_answer_over_a_shared_beginning_is_that_of_a_cold_run(
        self, open_house: Open
    ) -> None:
        members = {"one": "house", "two": "house"}
        house = open_house("one", "two", "alone", shared=members, exact=True)
        house.chat("one", system(RULES), user("Where?"))
        wanted: Json = {"max_tokens": 24, "temperature": 0, "logit_bias": GOES_ON}
        asked = [
            house.chat(name, system(RULES), user("How?"), **wanted) for name in ("two", "alone")
        ]
        assert asked[0].computed < 128 < asked[1].computed == asked[1].prompt
        assert asked[0].text == asked[1].text
