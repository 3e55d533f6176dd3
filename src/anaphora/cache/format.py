"""The block file format: one header that says everything, sealed, and then the payload.

A file holds one part of one block::

    offset 0      header, then its seal (32 bytes), then zeros up to a multiple of 4096
    then          payload, to the end of the file

The header (all integers little-endian)::

    8   magic "ANAPHORA"          32  payload seal
    2   format version            4   number of tokens
    2   flags (1: exact)          2   bytes in the owner's name
    32  key                       2   bytes in the part's name
    32  parent key                    owner's name, UTF-8
    16  segment id                    part's name, ASCII
    8   start position                tokens, 4 bytes each
    8   decoded from (-1: none)
    8   bytes in the payload

Seals are BLAKE3 MACs under keys derived from the namespace's secret, one per purpose. The index
stores headers with their seals in just this form.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from anaphora.cache.keys import BlockId

FORMAT_VERSION = 1
SEAL_BYTES = 32
PAGE = 4096

_MAGIC = b"ANAPHORA"
_FIXED = struct.Struct("<8sHH32s32s16sqqQ32sIHH")
_EXACT = 1


class DamagedError(Exception):
    """Stored bytes that are not what was once stored. Never leaves the package."""


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What a block file says about itself."""

    block: BlockId
    part: str
    decoded_from: int | None
    exact: bool
    payload_bytes: int
    payload_seal: bytes

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.page_bytes + self.payload_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes before the payload, a multiple of 4096."""
        names = len(self.block.owner.encode()) + len(self.part)
        return -(-(_FIXED.size + names + 4 * len(self.block) + SEAL_BYTES) // PAGE) * PAGE

    def is_for_same_bytes(self, other: Header) -> bool:
        """Whether both stand for the same part of the same block, in whatever version."""

        def identity(header: Header) -> tuple[object, ...]:
            block = header.block
            place = block.key, block.parent, block.owner, block.segment, block.start
            return *place, block.tokens.tobytes(), header.part, header.payload_bytes

        return identity(self) == identity(other)

    def encode(self) -> bytes:
        owner, part = self.block.owner.encode(), self.part.encode()
        fixed = _FIXED.pack(
            _MAGIC,
            FORMAT_VERSION,
            _EXACT if self.exact else 0,
            self.block.key,
            self.block.parent,
            self.block.segment,
            self.block.start,
            -1 if self.decoded_from is None else self.decoded_from,
            self.payload_bytes,
            self.payload_seal,
            len(self.block),
            len(owner),
            len(part),
        )
        return b"".join((fixed, owner, part, self.block.tokens.tobytes()))

    @staticmethod
    def decode(data: bytes) -> Header:
        """The header that ``data`` is, exactly. Raises :class:`DamagedError`."""
        if header_bytes(data) != len(data):
            raise DamagedError("header of the wrong length")
        fields = _FIXED.unpack_from(data)
        _, _, flags, key, parent, segment, start, decoded, payload, seal, _, n_owner, n_part = (
            fields
        )
        names_end = _FIXED.size + n_owner + n_part
        try:
            owner = data[_FIXED.size : _FIXED.size + n_owner].decode()
            part = data[_FIXED.size + n_owner : names_end].decode("ascii")
        except UnicodeDecodeError as error:
            raise DamagedError("header with an unreadable name") from error
        tokens = np.frombuffer(data[names_end:], dtype="<i4")
        return Header(
            BlockId(key, parent, owner, segment, start, tokens),
            part,
            None if decoded < 0 else decoded,
            bool(flags & _EXACT),
            payload,
            seal,
        )


def header_bytes(data: bytes) -> int:
    """Length (bytes) of the header that ``data`` begins with. Raises :class:`DamagedError`."""
    if len(data) < _FIXED.size:
        raise DamagedError("shorter than a header")
    magic, version, *_, n_tokens, n_owner, n_part = _FIXED.unpack_from(data)
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise DamagedError("not a block file of this version")
    return _FIXED.size + int(n_owner) + int(n_part) + 4 * int(n_tokens)


class Seals:
    """Keyed MACs of everything that is stored."""

    def __init__(self, secret: bytes) -> None:
        """``secret`` is the namespace's 32 random bytes."""

        def key(purpose: str) -> bytes:
            context = f"anaphora 2026-11-29 cache {purpose}"
            return blake3(secret, derive_key_context=context).digest()

        self._header, self._payload, self._entry = key("header"), key("payload"), key("entry")

    def payload(self, data: memoryview) -> bytes:
        return blake3(data, key=self._payload).digest()

    def sealed_header(self, header: Header) -> bytes:
        data = header.encode()
        return data + blake3(data, key=self._header).digest()

    def sealed_entry(self, data: bytes) -> bytes:
        return data + blake3(data, key=self._entry).digest()

    def page(self, header: Header) -> bytes:
        """Everything before the payload."""
        return self.sealed_header(header).ljust(header.page_bytes, b"\0")

    def open_entry(self, sealed: bytes) -> bytes:
        """The bytes under a seal. Raises :class:`DamagedError`."""
        data, seal = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
        if not hmac.compare_digest(blake3(data, key=self._entry).digest(), seal):
            raise DamagedError("entry with a broken seal")
        return data

    def open_header(self, sealed: bytes) -> Header:
        """The header under a seal. Raises :class:`DamagedError`."""
        data, seal = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
        if not hmac.compare_digest(blake3(data, key=self._header).digest(), seal):
            raise DamagedError("header with a broken seal")
        return Header.decode(data)

    def open_page(self, page: bytes) -> Header:
        """The header in the bytes before a payload, exactly. Raises :class:`DamagedError`."""
        size = header_bytes(page) + SEAL_BYTES
        header = self.open_header(page[:size])
        if len(page) != header.page_bytes or any(page[size:]):
            raise DamagedError("header that doesn't fill its pages with zeros")
        return header

    def check_payload(self, header: Header, payload: memoryview) -> None:
        """Raises :class:`DamagedError`."""
        if not hmac.compare_digest(self.payload(payload), header.payload_seal):
            raise DamagedError("payload with a broken seal")
