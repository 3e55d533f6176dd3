"""The disk tier (in progress)."""

from __future__ import annotations

from collections.abc import Iterable

from anaphora.cache.entries import Entry, EntryId
from anaphora.cache.format import Header
from anaphora.cache.index import Block
from anaphora.cache.memory import Buffer
from anaphora.cache.recency import Recency


class File:
    """One part of one block on disk."""

    __slots__ = ("block", "header")

    def __init__(self, block: Block, header: Header) -> None:
        self.block = block
        self.header = header

    @property
    def part(self) -> str:
        return self.header.part

    @property
    def decoded_from(self) -> int | None:
        return self.header.decoded_from

    @property
    def exact(self) -> bool:
        return self.header.exact


class DiskTier:
    budget: int
    used: int
    held: Recency[File]
    ready: bool
    bytes_written: int
    bytes_read: int
    write_failures: int
    touched: set[Block]

    def commit(self, entries: object) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def file_bytes(self, buffer: Buffer) -> int:
        raise NotImplementedError

    def put(self, buffer: Buffer) -> bool:
        raise NotImplementedError

    def read(self, file: File, buffer: Buffer) -> None:
        raise NotImplementedError

    def drop(self, file: File) -> None:
        raise NotImplementedError
