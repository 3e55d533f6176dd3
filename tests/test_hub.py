"""Models by name, from a local cache of the Hub."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from anaphora.errors import ModelNotFoundError
from anaphora.hub import HubModel, choose, fetch

REPO = "someone/tiny-GGUF"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The Hub's cache as its library lays it out: links to blobs, by commit."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "models--someone--tiny-GGUF"
        self.snapshot = self.folder / "snapshots" / COMMIT
        self.snapshot.mkdir(parents=True)
        (self.folder / "blobs").mkdir()
        (self.folder / "refs").mkdir()
        (self.folder / "refs" / "main").write_text(COMMIT)

    def add(self, name: str, source: Path | None = None) -> Path:
        blob = self.folder / "blobs" / f"blob{len(list((self.folder / 'blobs').iterdir()))}"
        if source is None:
            blob.write_text(name)
        else:
            shutil.copy(source, blob)
        link = self.snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
        return link


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return Hub(tmp_path)


@pytest.mark.parametrize(
    ("reference", "repo", "quant"),
    [
        ("hf:someone/tiny-GGUF", "someone/tiny-GGUF", None),
        ("hf:someone/tiny-GGUF:Q8_0", "someone/tiny-GGUF", "Q8_0"),
        ("hf:a/b.c_d-e:IQ4_NL", "a/b.c_d-e", "IQ4_NL"),
    ],
)
def test_references(reference: str, repo: str, quant: str | None) -> None:
    model = HubModel.parse(reference)
    assert (model.repo, model.quant) == (repo, quant)
    assert str(model) == reference


@pytest.mark.parametrize(
    "reference",
    [
        "hf:",
        "hf:name",
        "hf:/name",
        "hf:a/b/c",
        "hf:../../etc/passwd",
        "hf:a/..",
        "hf:./b",
        "hf:a/b:../x",
        "hf:a/b:",
        "hf:a/b:x/y",
        "hf:a/b:/etc/passwd",
        "hf:a/b:x\\y",
        "hf:a\\b/c",
        "hf:/etc/passwd",
        "hf:~/b",
        "hf:-a/b",
        "hf:a/b%2f..",
        "hf:a/b\x00",
        "hf:a--b/c",
        "hf:a/b\n",
        "hf:a/b c",
        "hf:" + "a" * 200 + "/b",
    ],
)
def test_what_is_no_reference_is_one_line(reference: str) -> None:
    with pytest.raises(ModelNotFoundError, match="use hf:OWNER/REPO") as caught:
        HubModel.parse(reference)
    assert "\n" not in str(caught.value)


MANY = [
    "README.md",
    "tiny-Q4_K_M.gguf",
    "tiny-Q8_0.gguf",
    "tiny-Q4_K.gguf",
    "mmproj-tiny-Q8_0.gguf",
    "tiny.imatrix.gguf",
    "F16/tiny-F16-00001-of-00002.gguf",
    "F16/tiny-F16-00002-of-00002.gguf",
    "BF16/tiny-BF16-00001-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("quant", "names"),
    [
        (None, ["tiny-Q4_K_M.gguf"]),
        ("Q8_0", ["tiny-Q8_0.gguf"]),
        ("q8_0", ["tiny-Q8_0.gguf"]),
        ("Q4_K", ["tiny-Q4_K.gguf"]),
        ("F16", MANY[6:8]),
    ],
)
def test_a_quant_picks_one_model(quant: str | None, names: list[str]) -> None:
    assert choose(HubModel(REPO, quant), MANY) == names


@pytest.mark.parametrize(
    ("quant", "names", "says"),
    [
        ("Q5_0", MANY, "has no Q5_0"),
        ("BF16", MANY, "not complete"),
        ("4", MANY, "has no 4"),
        (None, ["a-Q8_0.gguf", "b-Q8_0.gguf"], "several"),
        ("Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "several"),
        (None, ["README.md", "mmproj-a.gguf"], "no GGUF"),
        (None, ["../a.gguf", "/etc/a.gguf", "b/../../a.gguf", "..\\a.gguf"], "no GGUF"),
    ],
)
def test_what_cannot_be_picked_is_one_line(quant: str | None, names: list[str], says: str) -> None:
    with pytest.raises(ModelNotFoundError, match=says) as caught:
        choose(HubModel(REPO, quant), names)
    assert "\n" not in str(caught.value)


def test_the_only_model_needs_no_quant() -> None:
    assert choose(HubModel(REPO), ["tiny-Q2_K.gguf", "config.json"]) == ["tiny-Q2_K.gguf"]


def test_without_a_connection_the_cache_serves(hub: Hub) -> None:
    q8, q4 = hub.add("tiny-Q8_0.gguf"), hub.add("sub/tiny-Q4_K_M.gguf")
    assert fetch(HubModel(REPO, "Q8_0")) == q8
    assert fetch(HubModel(REPO)) == q4


def test_the_first_part_of_a_split_model_stands_for_all(hub: Hub) -> None:
    first = hub.add("tiny-Q8_0-00001-of-00002.gguf")
    with pytest.raises(ModelNotFoundError, match="not in the cache"):
        fetch(HubModel(REPO, "Q8_0"))
    hub.add("tiny-Q8_0-00002-of-00002.gguf")
    assert fetch(HubModel(REPO, "Q8_0")) == first


def test_what_is_not_there_is_one_line(hub: Hub) -> None:
    for model in (HubModel(REPO), HubModel("someone/else"), HubModel(REPO, "Q8_0")):
        with pytest.raises(ModelNotFoundError, match="not in the cache") as caught:
            fetch(model)
        assert "\n" not in str(caught.value)


def test_a_file_cannot_escape_its_repositorys_folder(hub: Hub, tmp_path: Path) -> None:
    secret = tmp_path / "secret.gguf"
    secret.write_text("mine")
    (hub.snapshot / "tiny-Q8_0.gguf").symlink_to(secret)
    for model in (HubModel(REPO), HubModel(REPO, "Q8_0")):
        with pytest.raises(ModelNotFoundError, match="leads out of the folder"):
            fetch(model)
    (hub.folder / "refs" / "main").write_text("../../outside")
    outside = hub.folder.parent / "outside"
    outside.mkdir()
    (outside / "tiny-Q8_0.gguf").write_text("mine")
    with pytest.raises(ModelNotFoundError, match="leads out of the folder"):
        fetch(HubModel(REPO, "Q8_0"))


def test_a_snapshot_or_a_part_that_leads_elsewhere_is_refused(hub: Hub, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "tiny-Q8_0.gguf").write_text("mine")
    (outside / "tiny-F16-00002-of-00002.gguf").write_text("mine")
    hub.add("tiny-F16-00001-of-00002.gguf")
    (hub.snapshot / "tiny-F16-00002-of-00002.gguf").symlink_to(
        outside / "tiny-F16-00002-of-00002.gguf"
    )
    (hub.snapshot / "sub").symlink_to(outside)
    with pytest.raises(ModelNotFoundError, match="leads out of the folder"):
        fetch(HubModel(REPO, "F16"))
    with pytest.raises(ModelNotFoundError, match=r"leads out of the folder|not in the cache"):
        fetch(HubModel(REPO, "Q8_0"))
    shutil.rmtree(hub.snapshot)
    hub.snapshot.symlink_to(outside)
    with pytest.raises(ModelNotFoundError, match="leads out of the folder"):
        fetch(HubModel(REPO, "Q8_0"))


class Endpoint:
    """Stands where the Hub is: counts who comes, and answers with what it was given, or not."""

    def __init__(self, answer: bytes) -> None:
        self.visits = 0
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                if not connection.recv(65536):
                    return
                self.visits += 1
                connection.sendall(self._answer)

    def close(self) -> None:
        socket.create_connection(self._socket.getsockname()).close()
        self._thread.join()
        self._socket.close()


def answering(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> Endpoint:
    endpoint = Endpoint(answer)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint.url)
    return endpoint


def test_where_the_hub_does_not_answer_it_is_asked_once_and_the_cache_serves(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = hub.add("tiny-Q4_K_M.gguf")
    for answer in (b"", b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"):
        endpoint = answering(monkeypatch, answer)
        try:
            assert fetch(HubModel(REPO)) == here
            assert endpoint.visits == 1
            with pytest.raises(ModelNotFoundError, match="can't be downloaded") as caught:
                fetch(HubModel("someone/else"))
            assert "\n" not in str(caught.value)
            assert endpoint.visits == 2
        finally:
            endpoint.close()


def test_a_repository_cannot_name_files_outside_its_folder(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["../tiny-Q8_0.gguf", "/tmp/tiny-Q8_0.gguf", "a/../../tiny-Q8_0.gguf"]
    siblings = [{"rfilename": name} for name in names]
    body = json.dumps({"id": REPO, "siblings": siblings}).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    endpoint = answering(monkeypatch, head.encode() + body)
    try:
        for quant in (None, "Q8_0"):
            with pytest.raises(ModelNotFoundError, match="no GGUF"):
                fetch(HubModel(REPO, quant))
        assert endpoint.visits == 2, "nothing was asked for but the list"
    finally:
        endpoint.close()


def test_a_repositorys_folder_may_itself_be_a_link(hub: Hub, tmp_path: Path) -> None:
    link = hub.add("tiny-Q8_0.gguf")
    moved = tmp_path / "other disk"
    hub.folder.rename(moved)
    hub.folder.symlink_to(moved)
    assert fetch(HubModel(REPO, "Q8_0")) == link


def test_commands_take_models_by_name(tmp_path: Path, tiny_llama: Path) -> None:
    Hub(tmp_path).add("tiny-Q8_0.gguf", tiny_llama)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "anaphora.cli", "chat", "hf:someone/tiny-GGUF"]
    command += ["--max-tokens", "2", "--cache-dir", str(tmp_path / "cache"), "--threads", "1"]
    done = subprocess.run(
        command, input="Hello\n", capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "computed" in done.stdout
