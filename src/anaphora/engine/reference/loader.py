"""Reading a Llama-family GGUF file into arrays, with the ``gguf`` package."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from anaphora.engine.identity import check_complete, model_digest, model_files
from anaphora.engine.reference.model import Floats, Layer, Shape, Transformer
from anaphora.engine.reference.vocabulary import BytePairVocabulary, TokenTable
from anaphora.errors import ModelFileError


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceModel:
    """What one GGUF file holds."""

    name: str
    transformer: Transformer
    vocabulary: BytePairVocabulary
    identity: Mapping[str, str]
    """All that the bytes of a cached block depend on besides its tokens."""


def load(path: str | os.PathLike[str]) -> ReferenceModel:
    """Read a whole model, dequantized to float32: four bytes of memory for each weight.

    Raises :class:`ModelNotFoundError`, or :class:`ModelFileError` for a damaged file and for a
    model that is no plain Llama with a byte-level BPE vocabulary.
    """
    digest = model_digest(path)
    check_complete(path)
    readers = [GGUFReader(file) for file in model_files(path)]
    metadata = _Metadata(path, readers[0])
    architecture = metadata.text("general.architecture")
    if architecture != "llama":
        raise ModelFileError(
            f"{path} has the architecture {architecture!r} and the reference engine knows only "
            "'llama': use the llama.cpp engine"
        )
    table = TokenTable(
        model=metadata.text("tokenizer.ggml.model"),
        pre=metadata.text("tokenizer.ggml.pre", "default"),
        texts=metadata.get("tokenizer.ggml.tokens"),
        types=metadata.get("tokenizer.ggml.token_type"),
        merges=metadata.get("tokenizer.ggml.merges", []),
        bos=metadata.get("tokenizer.ggml.bos_token_id", None),
        eos=metadata.get("tokenizer.ggml.eos_token_id", None),
        ends=[
            token
            for name in ("eot", "eom")
            if (token := metadata.get(f"tokenizer.ggml.{name}_token_id", None)) is not None
        ],
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", False),
    )
    return ReferenceModel(
        name=metadata.text("general.name", "unnamed"),
        transformer=_transformer(metadata, _Tensors(path, readers)),
        vocabulary=BytePairVocabulary(table),
        identity={"engine": "reference", "epoch": "1", "model": digest, "kv": "f32"},
    )


class _Metadata:
    def __init__(self, path: str | os.PathLike[str], reader: GGUFReader) -> None:
        self._path = path
        self._fields = reader.fields

    def get(self, key: str, *default: Any) -> Any:
        field = self._fields.get(key)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise ModelFileError(f"{self._path} lacks {key!r} in its metadata: convert the model again")

    def text(self, key: str, *default: str) -> str:
        return str(self.get(key, *default))

    def number(self, name: str, *default: float) -> float:
        value = self.get(f"llama.{name}", *default)
        if not isinstance(value, int | float):
            raise ModelFileError(
                f"{self._path} has layers that differ in {name}, which the reference engine "
                "doesn't know: use the llama.cpp engine"
            )
        return value

    def integer(self, name: str, *default: int) -> int:
        return int(self.number(name, *default))


class _Tensors:
    """Hands out tensors by name, and knows which were never asked for."""

    def __init__(self, path: str | os.PathLike[str], readers: Sequence[GGUFReader]) -> None:
        self._path = path
        self._left = {tensor.name: tensor for reader in readers for tensor in reader.tensors}

    def __contains__(self, name: str) -> bool:
        return f"{name}.weight" in self._left

    def take(self, name: str) -> Floats:
        tensor = self._left.pop(f"{name}.weight", None)
        if tensor is None:
            raise ModelFileError(f"{self._path} lacks the tensor {name}: convert the model again")
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)

    def check_all_taken(self) -> None:
        if self._left:
            raise ModelFileError(
                f"{self._path} has a tensor {min(self._left)}, which no plain Llama has: "
                "use the llama.cpp engine"
            )


def _transformer(metadata: _Metadata, tensors: _Tensors) -> Transformer:
    heads = metadata.integer("attention.head_count")
    width = metadata.integer("embedding_length")
    head_size = metadata.integer("attention.key_length", width // heads)
    shape = Shape(
        layers=metadata.integer("block_count"),
        heads=heads,
        kv_heads=metadata.integer("attention.head_count_kv", heads),
        head_size=head_size,
        norm_epsilon=metadata.number("attention.layer_norm_rms_epsilon"),
        context_size=metadata.integer("context_length"),
    )
    embedding = tensors.take("token_embd")
    layers = tuple(
        Layer(**{name: tensors.take(f"blk.{n}.{name}") for name in Layer.__slots__})
        for n in range(shape.layers)
    )
    transformer = Transformer(
        shape=shape,
        embedding=embedding,
        layers=layers,
        output_norm=tensors.take("output_norm"),
        output=tensors.take("output") if "output" in tensors else embedding,
        frequencies=_rope_frequencies(metadata, tensors, head_size),
    )
    tensors.check_all_taken()
    return transformer


def _rope_frequencies(
    metadata: _Metadata, tensors: _Tensors, head_size: int
) -> NDArray[np.float64]:
    """``base ** (-2i / d)`` for pair ``i``, slowed down as the file says."""
    scaling = metadata.text("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelFileError(
            f"the model has {scaling!r} RoPE scaling, which the reference engine doesn't know: "
            "use the llama.cpp engine"
        )
    turned = metadata.integer("rope.dimension_count", head_size)
    base = metadata.number("rope.freq_base", 10_000.0)
    frequencies: NDArray[np.float64] = base ** (-np.arange(0, turned, 2) / turned)
    if scaling == "linear":
        frequencies /= metadata.number("rope.scaling.factor")
    if "rope_freqs" in tensors:
        frequencies = frequencies / tensors.take("rope_freqs")
    return frequencies
