"""The cell ledger against a plain model of it: a list of cell sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anaphora.engine.llamacpp.cells import CellLedger

SIZE = 40
SEQUENCES = 5

operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, SEQUENCES - 1), st.integers(1, 15)),
        st.tuples(st.just("truncate"), st.integers(0, SEQUENCES - 1), st.integers(0, 20)),
        st.tuples(
            st.just("share"),
            st.tuples(st.integers(0, SEQUENCES - 1), st.integers(0, SEQUENCES - 1)),
            st.integers(1, 20),
        ),
    ),
    max_size=40,
)


@given(operations)
def test_counts_equal_those_of_plain_lists(steps: list[tuple[str, object, int]]) -> None:
    ledger = CellLedger(SIZE)
    plain: dict[int, list[int]] = {seq: [] for seq in range(SEQUENCES)}
    fresh = iter(range(10_000))

    for name, who, amount in steps:
        used = len({cell for cells in plain.values() for cell in cells})
        if name == "append" and isinstance(who, int) and used + amount <= SIZE:
            ledger.append(who, amount)
            plain[who] += [next(fresh) for _ in range(amount)]
        elif name == "truncate" and isinstance(who, int):
            ledger.truncate(who, amount)
            plain[who] = plain[who][:amount]
        elif name == "share" and isinstance(who, tuple):
            source, target = who
            if source != target and not plain[target] and plain[source]:
                ledger.share(source, target, amount)
                plain[target] = plain[source][:amount]

        held = [set(cells) for cells in plain.values()]
        assert ledger.used == len(set().union(*held))
        assert ledger.free == SIZE - ledger.used
        assert ledger.used <= ledger.top <= SIZE
        for seq, cells in plain.items():
            others = set().union(*(set(c) for s, c in plain.items() if s != seq))
            assert ledger.length(seq) == len(cells)
            assert ledger.alone(seq) == len(set(cells) - others)


def test_new_tokens_take_the_lowest_free_cells() -> None:
    ledger = CellLedger(16)
    ledger.append(0, 8)
    ledger.append(1, 4)
    ledger.truncate(0, 0)
    assert ledger.top == 12
    ledger.append(2, 8)
    assert ledger.top == 12
    ledger.truncate(1, 0)
    assert ledger.top == 8
