"""Random requests that have much in common."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from anaphora.profiles.outline import Boundary, Kind, Outline, Ttl


@dataclass(frozen=True)
class Asked:
    tokens: tuple[int, ...]
    outline: Outline
    wait: float
    """Seconds since the request before it."""


ttls: st.SearchStrategy[Ttl | None] = st.sampled_from([None, None, "5m", "1h", "30m", "12h"])
kinds: st.SearchStrategy[Kind] = st.sampled_from(["block", "block", "message", "developer"])


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """Prompts over two tokens, so that they share prefixes; empty blocks among them."""
    tokens: list[int] = []
    boundaries = []
    for _ in range(draw(st.integers(0, 7))):
        tokens += draw(st.lists(st.integers(0, 1), max_size=3))
        match = draw(st.sampled_from(["", "", "a"]))
        boundaries.append(Boundary(len(tokens), draw(kinds), match, draw(ttls)))
    tokens += draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
    outline = Outline(tuple(dict.fromkeys(boundaries)), draw(st.sampled_from([None, "30m", "12h"])))
    wait = draw(st.sampled_from([0.0, 1.0, 299.0, 300.0, 1500.0, 3600.0]))
    return Asked(tuple(tokens), outline, wait)
