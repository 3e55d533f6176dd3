"""A GGUF model loaded by llama.cpp, and what kind of memory it has."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib

from anaphora.engine.identity import check_complete, model_digest
from anaphora.engine.llamacpp import logs
from anaphora.engine.llamacpp.params import Params
from anaphora.engine.llamacpp.vocabulary import LlamaVocabulary
from anaphora.errors import ModelFileError, SettingsError
from anaphora.settings import Adapter

# Architectures whose memory is a plain cache of K and V for every layer and position: blocks of
# it can be cut out, put back and cut short at any token. Others that share a name with one of
# these (a sliding window, say) are told apart by their metadata below.
_PLAIN_ATTENTION = frozenset(
    """
    apertus arcee baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm codeshell command-r
    dbrx deci deepseek dots1 ernie4_5 ernie4_5-moe exaone falcon gemma glm4 glm4moe gpt2 gptneox
    granite granitemoe grok hunyuan-dense hunyuan-moe internlm2 jais llama maincoder mistral3
    minicpm mpt nemotron olmo olmo2 olmoe openelm orion pangu-embedded phi2 phi3 phimoe plamo qwen
    qwen2 qwen2moe qwen3 qwen3moe refact seed_oss smollm3 stablelm starcoder starcoder2 xverse
    """.split()
)


class LlamaModel:
    """A loaded model file. Close it after every context made from it."""

    def __init__(
        self, path: Path, params: Params, adapters: Sequence[Adapter] = (), *, altered: bool = False
    ) -> None:
        """Load ``path``; ``altered``: llama.cpp parameters are passed through, and may be why not.

        Raises:
            ModelNotFoundError: nothing there, or it can't be read.
            ModelFileError: no GGUF, truncated, or refused by llama.cpp (its reason is given).
            SettingsError: an adapter that doesn't fit the model.
        """
        self.digest = model_digest(path)
        check_complete(path)
        self.path = path
        self.pointer: Any = None
        self._vocabulary: LlamaVocabulary | None = None
        self._keep = params.keep
        with logs.errors() as errors:
            self.pointer = lib.llama_model_load_from_file(str(path).encode(), params.model)
        if not self.pointer:
            advice = "try without the llama.cpp parameters" if altered else "try another file"
            raise ModelFileError(f"{path} can't be loaded: {reason(errors)}; {advice}")
        try:
            self._vocabulary = LlamaVocabulary(self.pointer)
            self.metadata: Mapping[str, str] = _metadata(self.pointer)
            self.architecture = self.metadata.get("general.architecture", "unknown")
            self.name = self.metadata.get("general.name") or path.stem
            self.kind = self._kind()
            self.context_length = int(lib.llama_model_n_ctx_train(self.pointer))
            self.adapters = [self._load_adapter(adapter) for adapter in adapters]
        except BaseException:
            self.close()
            raise

    @property
    def vocabulary(self) -> LlamaVocabulary:
        assert self._vocabulary is not None
        return self._vocabulary

    @property
    def chat_template(self) -> str | None:
        template = lib.llama_model_chat_template(self.pointer, None)
        return None if template is None else str(template.decode(errors="replace"))

    @property
    def decodes(self) -> bool:
        """Whether the model can generate text at all."""
        return bool(lib.llama_model_has_decoder(self.pointer)) and not bool(
            lib.llama_model_has_encoder(self.pointer) or lib.llama_model_is_diffusion(self.pointer)
        )

    def number(self, key: str) -> int | None:
        """Integer metadata ``<architecture>.<key>``; ``None`` where absent or a list."""
        value = self.metadata.get(f"{self.architecture}.{key}", "")
        return int(value) if value.lstrip("-").isdigit() else None

    def kv_values_per_token(self) -> tuple[int, int]:
        """How many K and V values all layers together keep for one token."""
        layers = int(lib.llama_model_n_layer(self.pointer))
        heads = int(lib.llama_model_n_head_kv(self.pointer)) or 1
        width = int(lib.llama_model_n_embd(self.pointer)) // max(
            1, int(lib.llama_model_n_head(self.pointer))
        )
        key = self.number("attention.key_length") or width
        value = self.number("attention.value_length") or width
        return layers * heads * key, layers * heads * value

    def close(self) -> None:
        if self._vocabulary is not None:
            self._vocabulary.close()
        if self.pointer:
            lib.llama_model_free(self.pointer)  # frees its adapters too
            self.pointer = None

    def _kind(self) -> str:
        if lib.llama_model_is_hybrid(self.pointer):
            return "hybrid"
        if lib.llama_model_is_recurrent(self.pointer):
            return "recurrent"
        if not self.decodes:
            return "encoder"
        if lib.llama_model_n_swa(self.pointer) > 0:
            return "sliding-window"
        if self.number("attention.kv_lora_rank"):
            return "latent-attention"
        return "attention" if self.architecture in _PLAIN_ATTENTION else "unknown"

    def _load_adapter(self, adapter: Adapter) -> tuple[Any, float, str]:
        path = Path(adapter.path).expanduser()
        digest = model_digest(path)
        with logs.errors() as errors:
            pointer = lib.llama_adapter_lora_init(self.pointer, str(path).encode())
        if not pointer:
            why = errors[-1] if errors else "llama.cpp gives no reason"
            raise SettingsError(
                f"has {path}, which doesn't fit the model: {why}", setting="adapters"
            )
        return pointer, adapter.scale, digest


def _metadata(model: Any) -> dict[str, str]:
    """Scalar metadata as text, as llama.cpp prints it."""
    found: dict[str, str] = {}
    for index in range(lib.llama_model_meta_count(model)):
        key = _text(lib.llama_model_meta_key_by_index, model, index)
        found[key] = _text(lib.llama_model_meta_val_str_by_index, model, index)
    return found


def reason(errors: Sequence[str]) -> str:
    """What llama.cpp said first about why: its last words only say that it failed."""
    prefix = "error loading model: "
    reasons = [line.partition(prefix)[2] for line in errors if prefix in line]
    return next(iter(reasons or errors), "llama.cpp gives no reason")


def _text(read: Any, model: Any, index: int) -> str:
    buffer = ctypes.create_string_buffer(512)
    read(model, index, buffer, len(buffer))
    return buffer.value.decode(errors="replace")
