from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.cache import files
from anaphora.cache.format import PAGE, DamagedError, Header, Seals
from anaphora.cache.keys import Segment, link
from anaphora.cache.memory import rounded
from tests.cache.support import PAYLOAD, payload, prompt

SEALS = Seals(b"s" * 32)
BLOCK = link(b"p" * 32, Segment("ächme", b"salt"), 256, prompt(1))


def header(seal: bytes = b"x" * 32, decoded_from: int | None = None) -> Header:
    return Header(BLOCK, "base", decoded_from, False, PAYLOAD, seal)


def memory_with(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, rounded(len(data)))
    memory[: len(data)] = data
    return memory


@given(
    owner=st.text(max_size=10),
    part=st.sampled_from(["base", "window"]),
    count=st.integers(1, 3000),
    start=st.integers(0, 2**40),
    decoded_from=st.none() | st.integers(0, 2**40),
    exact=st.booleans(),
)
def test_a_header_says_what_it_was_told(
    owner: str, part: str, count: int, start: int, decoded_from: int | None, exact: bool
) -> None:
    block = link(b"p" * 32, Segment(owner, b"s"), start, prompt(1, length=count))
    written = Header(block, part, decoded_from, exact, PAYLOAD, b"x" * 32)
    page = SEALS.page(written)
    assert len(page) == written.page_bytes
    assert len(page) % PAGE == 0
    found = SEALS.open_page(page)
    assert found.is_for_same_bytes(written)
    assert (found.decoded_from, found.exact, found.payload_seal) == (
        decoded_from,
        exact,
        b"x" * 32,
    )
    assert found.encode() == written.encode()


def test_every_byte_before_the_payload_counts() -> None:
    page = SEALS.page(header())
    for place in range(len(page)):
        damaged = bytearray(page)
        damaged[place] ^= 1
        with pytest.raises(DamagedError):
            SEALS.open_page(bytes(damaged))


@pytest.mark.parametrize("length", [0, 1, 100, PAGE - 1])
def test_a_shortened_page_is_damaged(length: int) -> None:
    with pytest.raises(DamagedError):
        SEALS.open_page(SEALS.page(header())[:length])


def test_another_secret_opens_nothing() -> None:
    page = SEALS.page(header())
    with pytest.raises(DamagedError):
        Seals(b"t" * 32).open_page(page)


def test_seals_of_one_purpose_are_no_good_for_another() -> None:
    data = header().encode()
    with pytest.raises(DamagedError):
        SEALS.open_entry(SEALS.sealed_header(header()))
    with pytest.raises(DamagedError):
        SEALS.open_header(SEALS.sealed_entry(data))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [0, 1, PAGE, PAYLOAD, 300_000])
def test_a_file_is_read_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, size: int
) -> None:
    if not direct:
        monkeypatch.setattr(files, "_DIRECT", 0)
    data = payload(BLOCK.key, "base", size)
    written = Header(BLOCK, "base", None, False, size, SEALS.payload(memoryview(data)))
    path = tmp_path / "block"
    files.write_block(path, written, SEALS, memory_with(data))
    assert path.stat().st_size == written.file_bytes
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["block"]
    memory = memory_with(b"?" * size)
    assert files.read_block(path, written, SEALS, memory).encode() == written.encode()
    assert memory[:size] == data
    assert files.read_header(path, SEALS).encode() == written.encode()


def test_a_better_version_of_the_same_bytes_is_taken_with_its_own_header(tmp_path: Path) -> None:
    data = payload(BLOCK.key, "base")
    seal = SEALS.payload(memoryview(data))
    path = tmp_path / "block"
    files.write_block(path, header(seal), SEALS, memory_with(data))
    found = files.read_block(path, header(b"old" * 10 + b"xx", 5), SEALS, memory_with(data))
    assert found.decoded_from is None


def test_a_file_of_another_block_is_damaged(tmp_path: Path) -> None:
    data = payload(BLOCK.key, "base")
    seal = SEALS.payload(memoryview(data))
    path = tmp_path / "block"
    files.write_block(path, header(seal), SEALS, memory_with(data))
    other = link(b"q" * 32, Segment("ächme", b"salt"), 256, prompt(1))
    expected = Header(other, "base", None, False, PAYLOAD, seal)
    with pytest.raises(DamagedError):
        files.read_block(path, expected, SEALS, memory_with(data))


def test_a_fifo_or_link_is_not_waited_for_nor_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("fifo", "link"):
        with pytest.raises(DamagedError):
            files.read_header(tmp_path / name, SEALS)


def test_removing_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    files.remove(tmp_path / "link")
    assert (tmp_path / "folder" / "file").read_text() == "precious"
    files.remove(tmp_path / "folder")
    files.remove(tmp_path / "nothing")
    assert os.listdir(tmp_path) == []
