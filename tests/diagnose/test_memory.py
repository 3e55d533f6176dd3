"""What is remembered: bounded, switchable, and each tenant's own."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anaphora.diagnose.memory import PromptMemory
from anaphora.diagnose.prompts import Decision, Remembered
from anaphora.keys import Tenant
from tests.diagnose.support import FILLER, SYSTEM, VOCAB, message, remembered

ACME, BETA = Tenant("acme", b"1"), Tenant("beta", b"2")
SECRET = "The launch code is 4711. "


def prompt(request_id: str, text: str = "Hi") -> Remembered:
    return remembered([(SYSTEM, FILLER), (message(1), text)], request_id)


def test_a_request_is_explained_by_those_before_it() -> None:
    memory = PromptMemory()
    for number, text in enumerate(("Hi", "Ho", "Hi there")):
        memory.remember(ACME, "m", prompt(str(number), text))
    for number, nearest in ((0, None), (1, "0"), (2, "0")):
        found = memory.explain(ACME, "m", str(number), VOCAB)
        assert found is not None
        assert (found.nearest and found.nearest.request_id) == nearest
    assert memory.explain(ACME, "m", "3", VOCAB) is None


def test_nothing_of_another_tenant_is_ever_shown() -> None:
    memory = PromptMemory()
    memory.remember(ACME, "m", remembered([(SYSTEM, SECRET + FILLER)], "theirs"))
    memory.remember(BETA, "m", remembered([(SYSTEM, SECRET + "No. " + FILLER)], "mine"))
    memory.remember(Tenant("acme", b"other"), "m", remembered([(SYSTEM, SECRET)], "namesake"))
    assert memory.explain(BETA, "m", "theirs", VOCAB) is None
    for tenant, request_id in ((BETA, "mine"), (Tenant("acme", b"other"), "namesake")):
        found = memory.explain(tenant, "m", request_id, VOCAB)
        assert found is not None
        assert (found.cause, found.nearest, found.difference) == ("first_request", None, None)
    memory.remember(BETA, "m", remembered([(SYSTEM, SECRET + FILLER)], "mine too"))
    found = memory.explain(BETA, "m", "mine too", VOCAB)
    assert found is not None
    assert found.nearest is not None, "its own is shown, so that the above can fail"
    assert found.nearest.request_id == "mine"


def test_prompts_of_another_model_are_not_compared() -> None:
    memory = PromptMemory()
    memory.remember(ACME, "m", prompt("1"))
    memory.remember(ACME, "other", prompt("2"))
    assert memory.explain(ACME, "other", "1", VOCAB) is None
    found = memory.explain(ACME, "other", "2", VOCAB)
    assert found is not None
    assert found.nearest is None


def test_it_can_be_switched_off() -> None:
    memory = PromptMemory(max_bytes=0)
    memory.remember(ACME, "m", prompt("1"))
    assert memory.explain(ACME, "m", "1", VOCAB) is None


def test_each_tenant_has_a_number_of_requests() -> None:
    memory = PromptMemory(max_requests=2)
    for number in range(4):
        memory.remember(ACME, "m", prompt(str(number)))
    memory.remember(BETA, "m", prompt("beta"))
    known = [memory.explain(ACME, "m", str(number), VOCAB) is not None for number in range(4)]
    assert known == [False, False, True, True]
    assert memory.explain(BETA, "m", "beta", VOCAB) is not None


def test_the_tenant_with_most_bytes_makes_room() -> None:
    memory = PromptMemory(max_bytes=100_000)
    memory.remember(BETA, "m", prompt("beta"))
    for number in range(1000):
        memory.remember(ACME, "m", prompt(str(number)))
    assert memory.explain(BETA, "m", "beta", VOCAB) is not None
    assert memory.explain(ACME, "m", "0", VOCAB) is None
    assert memory.explain(ACME, "m", "999", VOCAB) is not None


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 400))),
    st.integers(1, 4000),
    st.integers(1, 4),
)
def test_the_bounds_always_hold(
    asked: list[tuple[str, int, int]], max_bytes: int, max_requests: int
) -> None:
    memory = PromptMemory(max_bytes=max_bytes, max_requests=max_requests)
    sizes: dict[tuple[str, int], int] = {}
    for name, number, length in asked:
        tokens = np.zeros(length, dtype=np.int32)
        memory.remember(
            Tenant(name, b""), "m", Remembered(str(number), 0.0, tokens, (), {}, Decision(0))
        )
        sizes[name, number] = tokens.nbytes
        known = [
            key for key in sizes if memory.explain(Tenant(key[0], b""), "m", str(key[1]), VOCAB)
        ]
        assert sum(sizes[key] for key in known) <= max_bytes
        for tenant in "abc":
            assert sum(key[0] == tenant for key in known) <= max_requests
