"""Fixtures that several tests share: tiny models, written once for each test run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from anaphora.bundled import bundled_model
from tests.tiny_models import Options, write_adapter, write_model

SOAK = bool(os.environ.get("ANAPHORA_SOAK"))
"""Whether to run the full counts."""

TinyModel = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """``tiny_model(kind, **options)``: path of such a model, written when first wanted."""
    folder = tmp_path_factory.mktemp("models")
    written: dict[tuple[str, Options], Path] = {}

    def get(kind: str = "llama", **options: int | str | Path | tuple[str, ...]) -> Path:
        key = kind, Options(**options)  # type: ignore[arg-type]
        if key not in written:
            written[key] = write_model(folder / f"{kind}-{len(written)}.gguf", *key)
        return written[key]

    return get


@pytest.fixture(scope="session")
def tiny_llama(tiny_model: TinyModel) -> Path:
    """Plain attention, weights in F32."""
    return tiny_model("llama", f32=True)


@pytest.fixture(scope="session")
def tiny_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter for :func:`tiny_llama`."""
    return write_adapter(tmp_path_factory.mktemp("adapters") / "adapter.gguf")


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, requantized to Q8_0."""
    return bundled_model(tmp_path_factory.mktemp("bundled"))
