"""Tiny random models as GGUF files (0.2 to 1.2 MB), one for every kind of memory a model can have.

Their weights are random but not small, so that the logits depend strongly on the whole history and
a wrongly restored cache shows. To write them by hand:
``python -m tests.tiny_models FOLDER [KIND ...]``
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter
from numpy.typing import NDArray

WIDTH, HEAD_SIZE, HEADS, KV_HEADS, FEED_FORWARD, CONTEXT = 64, 32, 2, 1, 96, 8192

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MERGES = ("Ġ t", "Ġ a", "h e", "i n")
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NORMAL_TYPE, _CONTROL_TYPE, _USER_DEFINED_TYPE = 1, 3, 4


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level BPE vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + n) for n, byte in enumerate(rest)}
    return [characters[byte] for byte in range(256)]


def _in_alphabet(text: str) -> str:
    alphabet = byte_alphabet()
    return "".join(alphabet[byte] for byte in text.encode())


VOCABULARY = (*byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES), *CONTROL)


@dataclass(frozen=True)
class Options:
    """How a tiny model is made; the defaults are those of an ordinary file."""

    seed: int = 0
    f32: bool = False
    """Matrices as F32 instead of F16."""
    layers: int | None = None
    """``None``: as few as show the kind's behaviour."""
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    tied: bool = False
    """No output matrix: the embedding serves as one."""
    rope_frequencies: bool = False
    """Write ``rope_freqs.weight``, as Llama 3.1 and later have it."""
    window: int = 512
    """Tokens a sliding-window layer sees."""
    alignment: int | None = None
    """Bytes; ``None``: not said in the file, which means 32."""
    tensors_per_file: int = 0
    """Split the model into files of so many; 0: one file."""
    pre: str = "default"
    """Name of the pre-tokenizer."""
    user_defined: bool = False
    """Add ``<think>``, a token that is matched in plain text though it is no control token."""
    template: str = CHATML
    """The chat template."""
    control: tuple[str, ...] = ()
    """Further control tokens."""
    script: str = ""
    """What a model of the kind ``script`` says to everything; each of the further control tokens
    can be in it once."""
    alternative: str = ""
    """What it says instead in every other answer, by chance; empty: nothing."""
    context: int = CONTEXT
    """Tokens it was trained for."""
    vocabulary: Path | None = None
    """A model file to take the vocabulary from; ``None``: a byte is a token, nearly."""

    @property
    def spoken(self) -> list[list[str]]:
        """The tokens of the script and of its alternative, none of which is there twice.

        They are none of the byte-level vocabulary.
        """
        seen: set[str] = set()
        return [self._cut(text, seen) for text in (self.script, self.alternative) if text]

    def _cut(self, script: str, seen: set[str]) -> list[str]:
        chunks: list[str] = []
        pattern = "|".join(map(re.escape, self.control))
        for text in re.split(f"({pattern})", script) if pattern else [script]:
            if text in self.control:
                chunks.append(text)
                continue
            chunk = ""
            for character in text:
                chunk += character
                if len(chunk) > 2 and chunk not in seen:
                    chunks.append(chunk)
                    seen.add(chunk)
                    chunk = ""
            if chunk:  # a repeated rest: it becomes a part of the token before it
                chunks[-1] += chunk
        assert len(set(chunks)) == len(chunks)
        return chunks


@dataclass(frozen=True)
class _Tokens:
    """A vocabulary; the token that ends an answer is called ``<|im_end|>`` in each."""

    texts: tuple[str, ...] = VOCABULARY
    types: tuple[int, ...] = (
        *[_NORMAL_TYPE] * (len(VOCABULARY) - len(CONTROL)),
        *[_CONTROL_TYPE] * len(CONTROL),
    )
    merges: tuple[str, ...] = MERGES
    pre: str = "default"


@cache
def _tokens_of(model: Path) -> _Tokens:
    fields = GGUFReader(model).fields

    def get(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    return _Tokens(tuple(get("tokens")), tuple(get("token_type")), tuple(get("merges")), get("pre"))


class _Model:
    """One GGUF file being written. Shapes are given in GGUF's order: input dimension first."""

    def __init__(self, path: Path, arch: str, layers: int, options: Options) -> None:
        self.options = options
        self.layers = layers if options.layers is None else options.layers
        self._arch = arch
        self._random = np.random.default_rng(options.seed)
        self._gguf = writer = GGUFWriter(path, arch, split_max_tensors=options.tensors_per_file)
        if options.alignment is not None:
            writer.add_custom_alignment(options.alignment)
        writer.add_name(f"tiny-{arch}")
        writer.add_tokenizer_model("gpt2")
        tokens = _tokens_of(options.vocabulary) if options.vocabulary else _Tokens(pre=options.pre)
        added = {"<think>": _USER_DEFINED_TYPE} if options.user_defined else {}
        for chunk in chain(*options.spoken):
            if chunk not in options.control:
                added[_in_alphabet(chunk)] = _NORMAL_TYPE
        added |= dict.fromkeys(options.control, _CONTROL_TYPE)
        for text in tokens.texts:  # a real vocabulary may have a token of the script already
            added.pop(text, None)
        self.texts = [*tokens.texts, *added]
        self._vocabulary_size = len(self.texts)
        writer.add_tokenizer_pre(tokens.pre)
        writer.add_token_list(self.texts)
        writer.add_token_types([*tokens.types, *added.values()])
        writer.add_token_merges(list(tokens.merges))
        writer.add_bos_token_id(tokens.texts.index("<|endoftext|>"))
        writer.add_eos_token_id(tokens.texts.index("<|im_end|>"))
        writer.add_add_bos_token(False)
        writer.add_chat_template(options.template)
        self.set(context_length=options.context, embedding_length=WIDTH, block_count=self.layers)
        self.set(attention__layer_norm_rms_epsilon=1e-5)

    def set(self, **values: int | float | Sequence[int]) -> None:
        """Write metadata of the architecture; ``__`` stands for a dot."""
        for name, value in values.items():
            key = f"{self._arch}.{name.replace('__', '.')}"
            if isinstance(value, int):
                self._gguf.add_uint32(key, value)
            elif isinstance(value, float):
                self._gguf.add_float32(key, value)
            else:
                self._gguf.add_array(key, list(value))

    def matrix(self, name: str, *shape: int, gain: float = 1.0, f32: bool = False) -> None:
        values = self._random.normal(0, gain / np.sqrt(shape[0]), shape[::-1])
        full = f32 or self.options.f32
        self._gguf.add_tensor(name, values.astype(np.float32 if full else np.float16))

    def vector(self, name: str, *shape: int, mean: float = 1.0) -> None:
        """Norms and biases: F32 always."""
        self.tensor(name, mean + self._random.normal(0, 0.1, shape[::-1]))

    def tensor(self, name: str, values: NDArray[np.float64]) -> None:
        self._gguf.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))

    def embeddings(self) -> None:
        self.matrix("token_embd.weight", WIDTH, self._vocabulary_size, gain=8.0)
        self.vector("output_norm.weight", WIDTH)
        if not self.options.tied:
            self.matrix("output.weight", WIDTH, self._vocabulary_size, gain=2.0)

    def heads(self, attends: Sequence[bool] | None = None) -> None:
        """Metadata of the attention; ``attends`` says of a hybrid's layers which have one."""
        kv_heads = self.options.kv_heads
        self.set(
            attention__head_count=self.options.heads,
            attention__head_count_kv=(
                kv_heads if attends is None else [kv_heads if yes else 0 for yes in attends]
            ),
            attention__key_length=HEAD_SIZE,
            attention__value_length=HEAD_SIZE,
            rope__dimension_count=HEAD_SIZE,
            feed_forward_length=FEED_FORWARD,
        )

    def attention(self, layer: int, qk_norm: bool = False) -> None:
        block, heads, kv_heads = f"blk.{layer}", self.options.heads, self.options.kv_heads
        self.matrix(f"{block}.attn_q.weight", WIDTH, HEAD_SIZE * heads, gain=2.0)
        self.matrix(f"{block}.attn_k.weight", WIDTH, HEAD_SIZE * kv_heads, gain=2.0)
        self.matrix(f"{block}.attn_v.weight", WIDTH, HEAD_SIZE * kv_heads)
        self.matrix(f"{block}.attn_output.weight", HEAD_SIZE * heads, WIDTH)
        if qk_norm:
            self.vector(f"{block}.attn_q_norm.weight", HEAD_SIZE, mean=1.5)
            self.vector(f"{block}.attn_k_norm.weight", HEAD_SIZE, mean=1.5)

    def feed_forward(self, layer: int) -> None:
        self.matrix(f"blk.{layer}.ffn_gate.weight", WIDTH, FEED_FORWARD)
        self.matrix(f"blk.{layer}.ffn_up.weight", WIDTH, FEED_FORWARD)
        self.matrix(f"blk.{layer}.ffn_down.weight", FEED_FORWARD, WIDTH)

    def experts(self, layer: int, count: int, size: int) -> None:
        self.matrix(f"blk.{layer}.ffn_gate_inp.weight", WIDTH, count, gain=3.0, f32=True)
        self.matrix(f"blk.{layer}.ffn_gate_exps.weight", WIDTH, size, count)
        self.matrix(f"blk.{layer}.ffn_up_exps.weight", WIDTH, size, count)
        self.matrix(f"blk.{layer}.ffn_down_exps.weight", size, WIDTH, count)

    def mamba(self, layer: int, norms: bool = False) -> None:
        """A Mamba-1 mixer; its time constants are spread wide so that old state still shows."""
        inner, state, convolution, rank = 128, 16, 4, 4
        block = f"blk.{layer}"
        self.matrix(f"{block}.ssm_in.weight", WIDTH, 2 * inner)
        self.matrix(f"{block}.ssm_conv1d.weight", convolution, inner, f32=True)
        self.vector(f"{block}.ssm_conv1d.bias", inner, mean=0.0)
        self.matrix(f"{block}.ssm_x.weight", inner, rank + 2 * state)
        self.matrix(f"{block}.ssm_dt.weight", rank, inner, f32=True)
        self.vector(f"{block}.ssm_dt.bias", inner, mean=-1.0)
        rates = self._random.uniform(np.log(0.002), np.log(0.5), (inner, state))
        self.tensor(f"{block}.ssm_a", -np.exp(rates))
        self.vector(f"{block}.ssm_d", inner)
        self.matrix(f"{block}.ssm_out.weight", inner, WIDTH)
        if norms:
            self.vector(f"{block}.ssm_dt_norm.weight", rank)
            self.vector(f"{block}.ssm_b_norm.weight", state)
            self.vector(f"{block}.ssm_c_norm.weight", state)

    def mamba_sizes(self) -> None:
        self.set(ssm__inner_size=128, ssm__state_size=16, ssm__conv_kernel=4, ssm__time_step_rank=4)

    def close(self) -> None:
        self._gguf.write_header_to_file()
        self._gguf.write_kv_data_to_file()
        self._gguf.write_tensors_to_file()
        self._gguf.close()


def _llama(path: Path, options: Options) -> None:
    model = _Model(path, "llama", 2, options)
    model.heads()
    model.embeddings()
    if options.rope_frequencies:
        model.tensor("rope_freqs.weight", np.geomspace(1.0, 8.0, HEAD_SIZE // 2))
    for layer in range(model.layers):
        model.vector(f"blk.{layer}.attn_norm.weight", WIDTH)
        model.attention(layer)
        model.vector(f"blk.{layer}.ffn_norm.weight", WIDTH)
        model.feed_forward(layer)
    model.close()


def _script(path: Path, options: Options) -> None:
    """Says ``options.script`` (or its alternative) behind a line end, whatever stands before that.

    Attention and feed-forward add nothing, so the next token depends on the last one alone; and as
    no token of the script is there twice, each of them can name the next.
    """
    model = _Model(path, "llama", 1, options)
    model.heads()
    random = np.random.default_rng(options.seed)
    embeddings = random.normal(0, 1, (len(model.texts), WIDTH))
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    output = np.zeros_like(embeddings)
    number = {text: token for token, text in enumerate(model.texts)}
    for chunks in options.spoken:
        spoken = [c if c in options.control else _in_alphabet(c) for c in chunks]
        order = [number[text] for text in ("\u010a", *spoken, "<|im_end|>")]
        for token, following in pairwise(order):
            output[following] += 10 * embeddings[token]
    model.tensor("token_embd.weight", embeddings)
    model.tensor("output.weight", output)
    model.tensor("output_norm.weight", np.ones(WIDTH))
    model.vector("blk.0.attn_norm.weight", WIDTH)
    for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
        sizes = {"attn_q": HEAD_SIZE * HEADS, "attn_k": HEAD_SIZE, "attn_v": HEAD_SIZE}
        model.matrix(f"blk.0.{name}.weight", WIDTH, sizes.get(name, FEED_FORWARD))
    model.tensor("blk.0.attn_output.weight", np.zeros((WIDTH, HEAD_SIZE * HEADS)))
    model.vector("blk.0.ffn_norm.weight", WIDTH)
    model.tensor("blk.0.ffn_down.weight", np.zeros((WIDTH, FEED_FORWARD)))
    model.close()


def _qwen3moe(path: Path, options: Options) -> None:
    model = _Model(path, "qwen3moe", 2, options)
    model.heads()
    model.set(expert_count=4, expert_used_count=2, expert_feed_forward_length=48)
    model.embeddings()
    for layer in range(model.layers):
        model.vector(f"blk.{layer}.attn_norm.weight", WIDTH)
        model.attention(layer, qk_norm=True)
        model.vector(f"blk.{layer}.ffn_norm.weight", WIDTH)
        model.experts(layer, count=4, size=48)
    model.close()


def _gemma3(path: Path, options: Options) -> None:
    """Every second layer sees only the latest ``options.window`` tokens."""
    model = _Model(path, "gemma3", 4, options)
    model.heads()
    model.set(
        attention__sliding_window=options.window,
        attention__sliding_window_pattern=2,
        rope__freq_base=1e6,
    )
    model.embeddings()
    for layer in range(model.layers):
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            model.vector(f"blk.{layer}.{norm}.weight", WIDTH)
        model.attention(layer, qk_norm=True)
        model.feed_forward(layer)
    model.close()


def _mamba(path: Path, options: Options) -> None:
    """Recurrent: a state of fixed size and no attention."""
    model = _Model(path, "mamba", 2, options)
    model.set(feed_forward_length=0, attention__head_count=0)
    model.mamba_sizes()
    model.embeddings()
    for layer in range(model.layers):
        model.vector(f"blk.{layer}.attn_norm.weight", WIDTH)
        model.mamba(layer)
    model.close()


def _jamba(path: Path, options: Options) -> None:
    """Hybrid: recurrent and attention layers by turns."""
    model = _Model(path, "jamba", 4, options)
    attends = [layer % 2 == 1 for layer in range(model.layers)]
    model.heads(attends)
    model.mamba_sizes()
    model.embeddings()
    for layer, attention in enumerate(attends):
        model.vector(f"blk.{layer}.attn_norm.weight", WIDTH)
        if attention:
            model.attention(layer)
        else:
            model.mamba(layer, norms=True)
        model.vector(f"blk.{layer}.ffn_norm.weight", WIDTH)
        model.feed_forward(layer)
    model.close()


KINDS: dict[str, Callable[[Path, Options], None]] = {
    "llama": _llama,
    "script": _script,
    "qwen3moe": _qwen3moe,
    "gemma3": _gemma3,
    "mamba": _mamba,
    "jamba": _jamba,
}


def write_model(path: Path, kind: str = "llama", options: Options = Options()) -> Path:
    """Write a random model of ``kind`` (see :data:`KINDS`); returns ``path``, or its first part."""
    KINDS[kind](path, options)
    return path if path.exists() else next(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def write_adapter(path: Path, *, rank: int = 4, alpha: float = 8.0, seed: int = 1) -> Path:
    """Write a random LoRA adapter for the default ``llama`` to ``path``, and return it."""
    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    outputs = {"attn_q": HEAD_SIZE * HEADS, "attn_k": HEAD_SIZE * KV_HEADS}
    for layer in range(2):
        for name, size in outputs.items():
            a = random.normal(0, 1 / np.sqrt(WIDTH), (rank, WIDTH)).astype(np.float32)
            b = random.normal(0, 1, (size, rank)).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_a", a)
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or KINDS:
        print(write_model(folder / f"{name}.gguf", name))
