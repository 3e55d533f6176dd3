"""The index and the entries as plainly as they can be said: every prefix, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

from anaphora.cache.keys import BlockId, Segment, Tokens, segment_id

Step = tuple[int, bytes]
"""A token and the segment it lies in."""


def steps(tokens: Tokens, segments: tuple[Segment, ...]) -> list[Step]:
    walked = []
    for position, token in enumerate(tokens.tolist()):
        segment = next(s for s in segments if s.end is None or position < s.end)
        walked.append((token, segment_id(segment)))
    return walked


def agreeing(a: list[Step], b: list[Step]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@dataclass
class NaiveIndex:
    root: bytes
    blocks: dict[bytes, BlockId] = field(default_factory=dict)
    """Those with bytes."""

    def longest(self, tokens: Tokens, segments: tuple[Segment, ...]) -> int:
        wanted = steps(tokens, segments)
        chains = [self._chain(block) for block in self.blocks.values()]
        return max((agreeing(wanted, chain) for chain in chains if chain), default=0)

    def _chain(self, block: BlockId) -> list[Step]:
        """Everything up to the end of a block; nothing where a block before it has no bytes."""
        before: list[Step] = []
        if block.parent != self.root:
            if block.parent not in self.blocks:
                return []
            before = self._chain(self.blocks[block.parent])
            if not before:
                return []
        return before + [(token, block.segment) for token in block.tokens.tolist()]


@dataclass
class NaiveEntries:
    promised: list[tuple[str, list[Step]]] = field(default_factory=list)

    def read_tokens(self, tokens: Tokens, segments: tuple[Segment, ...]) -> int:
        owners = {segment.owner for segment in segments}
        wanted = steps(tokens, segments)
        return max(
            (agreeing(wanted, prefix) for owner, prefix in self.promised if owner in owners),
            default=0,
        )
