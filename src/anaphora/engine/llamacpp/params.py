"""From :class:`~anaphora.settings.Settings` to llama.cpp's parameter structs.

llama.cpp's own parameters pass through by their names in ``llama.h``, except those the engine
must own. A few that are pointers there have a plain form here: ``override_tensor``, ``cpu_moe``,
``n_cpu_moe``, ``tensor_split`` and ``kv_overrides``.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llama_cpp import llama_cpp as lib

from anaphora.engine.llamacpp import ggml
from anaphora.errors import SettingsError
from anaphora.settings import MOST_THREADS, Settings

KV_TYPES: dict[str, int] = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
}
_UNQUANTIZED = ("f32", "f16", "bf16")

_MODEL_FIELDS = ("n_gpu_layers", "main_gpu", "check_tensors", "use_extra_bufts", "no_host")
_CONTEXT_FIELDS = (
    "n_batch",
    "n_ubatch",
    "n_threads",
    "n_threads_batch",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "offload_kqv",
    "op_offload",
)
_ROPE_FIELDS = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)
_CHOICES: dict[str, dict[str, int]] = {
    "split_mode": {"none": 0, "layer": 1, "row": 2, "tensor": 3},
    "rope_scaling_type": {"none": 0, "linear": 1, "yarn": 2, "longrope": 3},
    "load_mode": {"none": 0, "mmap": 1, "mlock": 2, "mmap_mlock": 3, "direct_io": 4},
}
_PLAIN_FORMS = ("override_tensor", "cpu_moe", "n_cpu_moe", "tensor_split", "kv_overrides")
_MOST_LAYERS = 512
"""llama.cpp's own limit."""
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"

PASS_THROUGH = tuple(sorted({*_MODEL_FIELDS, *_CONTEXT_FIELDS, *_CHOICES, *_PLAIN_FORMS}))
"""Names accepted in :attr:`Settings.llama`."""


@dataclass(slots=True)
class Params:
    """Filled structs, and what they point to."""

    model: Any
    context: Any
    flash_attn: bool
    type_k: str
    type_v: str
    keep: list[Any] = field(default_factory=list)
    """Python objects the structs point into; they must live as long as the structs are used."""


def kv_types(kv_type: str, flash_attn: bool) -> tuple[str, str]:
    """K and V types of ``K[,V]``.

    One plain type sets both. One quantized type sets both with flash attention and only K without
    it, since llama.cpp can't use a quantized V then.

    Raises:
        SettingsError: an unknown type, or a quantized V without flash attention.
    """
    names = [name.strip().lower() for name in kv_type.split(",")]
    if len(names) > 2 or not all(name in KV_TYPES for name in names):
        raise SettingsError(
            f"is {kv_type!r}: use K or K,V with types out of {', '.join(KV_TYPES)}",
            setting="kv_type",
        )
    k = names[0]
    both = k in _UNQUANTIZED or flash_attn
    v = names[1] if len(names) == 2 else (k if both else "f16")
    if v not in _UNQUANTIZED and not flash_attn:
        raise SettingsError(
            f"is {kv_type!r}, and a quantized V needs flash attention: switch that on, "
            f"or use {k},f16",
            setting="kv_type",
        )
    return k, v


def build(settings: Settings) -> Params:
    """Fill llama.cpp's structs; ``n_ctx`` and ``n_seq_max`` are set when the context is made.

    Raises:
        SettingsError: a name that is unknown or owned by the engine, or a value of the wrong type.
    """
    model, context = lib.llama_model_default_params(), lib.llama_context_default_params()
    offloads = bool(lib.llama_supports_gpu_offload())
    model.n_gpu_layers = -1 if offloads else 0
    if settings.gpu_layers is not None:
        if not -(2**31) <= settings.gpu_layers < 2**31:
            raise SettingsError(
                f"is {settings.gpu_layers}: use a number of layers, or -1 for all",
                setting="gpu_layers",
            )
        model.n_gpu_layers = settings.gpu_layers
    if settings.threads is not None:
        context.n_threads = context.n_threads_batch = settings.threads
    else:
        context.n_threads = context.n_threads_batch = ggml.default_threads()
    context.no_perf = True

    flash_attn = {"on": True, "off": False}.get(
        settings.flash_attn, offloads and model.n_gpu_layers != 0
    )
    k, v = kv_types(settings.kv_type, flash_attn)
    context.flash_attn_type = int(flash_attn)
    context.type_k, context.type_v = KV_TYPES[k], KV_TYPES[v]

    params = Params(model, context, flash_attn, k, v)
    _pass_through(settings.llama, params)
    return params


def rope_identity(params: Params) -> dict[str, str]:
    """RoPE settings as they enter the cache key; 0 and -1 stand for the model's own."""
    return {name: repr(getattr(params.context, name)) for name in _ROPE_FIELDS}


def _pass_through(values: Mapping[str, object], params: Params) -> None:
    for name, value in values.items():
        if name in _CHOICES:
            choices = _CHOICES[name]
            if not isinstance(value, str) or value not in choices:
                raise _refusal(f"{name} = {value!r}: use {', '.join(choices)}")
            target = params.context if name == "rope_scaling_type" else params.model
            setattr(target, name, choices[value])
        elif name in _MODEL_FIELDS:
            _assign(params.model, name, value)
        elif name in _CONTEXT_FIELDS:
            _assign(params.context, name, value)
        elif name == "tensor_split":
            params.model.tensor_split = _tensor_split(value, params)
        elif name == "kv_overrides":
            params.model.kv_overrides = _kv_overrides(value, params)
        elif name not in _PLAIN_FORMS:
            raise _refusal(
                f"{name!r}, which is no llama.cpp parameter that can be passed through; "
                f"known: {', '.join(PASS_THROUGH)}"
            )
    overrides = list(_buffer_overrides(values))
    if overrides:
        _set_buffer_overrides(overrides, params)


def _refusal(problem: str) -> SettingsError:
    return SettingsError(f"has {problem}", setting="llama")


def _assign(struct: Any, name: str, value: object) -> None:
    kind = dict(struct._fields_)[name]
    try:
        if kind is ctypes.c_bool:
            if not isinstance(value, bool):
                raise TypeError
            setattr(struct, name, value)
        elif kind is ctypes.c_float:
            if not math.isfinite(float(value)):  # type: ignore[arg-type]
                raise TypeError
            setattr(struct, name, float(value))  # type: ignore[arg-type]
        elif isinstance(value, bool) or not isinstance(value, int):
            raise TypeError
        else:
            low = 0 if kind is ctypes.c_uint32 else -(2**31)
            high = MOST_THREADS if name.startswith("n_threads") else 2**31 - 1
            if not low <= value <= high:
                raise TypeError
            setattr(struct, name, value)
    except (TypeError, ValueError):
        what = {ctypes.c_bool: "true or false", ctypes.c_float: "a number"}.get(
            kind, "an integer in its range"
        )
        raise _refusal(f"{name} = {value!r}: use {what}") from None


def _tensor_split(value: object, params: Params) -> Any:
    devices = lib.llama_max_devices()
    shares = value if isinstance(value, list | tuple) else str(value).split(",")
    try:
        numbers = [float(share) for share in shares]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError
    except (TypeError, ValueError):
        raise _refusal(f"tensor_split = {value!r}: use numbers, one per GPU") from None
    if len(numbers) > devices:
        raise _refusal(f"tensor_split of {len(numbers)} shares: use at most {devices}")
    array = (ctypes.c_float * devices)(*numbers)
    params.keep.append(array)
    return array


def _kv_overrides(value: object, params: Params) -> Any:
    if not isinstance(value, Mapping) or not value or not all(isinstance(k, str) for k in value):
        raise _refusal(f"kv_overrides = {value!r}: use a table of metadata keys and values")
    array = (lib.llama_model_kv_override * (len(value) + 1))()
    for entry, (key, new) in zip(array, value.items(), strict=False):
        entry.key = _override_text(key, key)
        if isinstance(new, bool):
            entry.tag, entry.value.val_bool = lib.LLAMA_KV_OVERRIDE_TYPE_BOOL, new
        elif isinstance(new, int) and -(2**63) <= new < 2**63:
            entry.tag, entry.value.val_i64 = lib.LLAMA_KV_OVERRIDE_TYPE_INT, new
        elif isinstance(new, float):
            entry.tag, entry.value.val_f64 = lib.LLAMA_KV_OVERRIDE_TYPE_FLOAT, new
        elif isinstance(new, str):
            entry.tag = lib.LLAMA_KV_OVERRIDE_TYPE_STR
            entry.value.val_str = _override_text(key, new)
        else:
            raise _refusal(
                f"kv_overrides with {key} = {new!r}: use true, false, a number or a text, "
                "and quotes around a key with dots"
            )
    params.keep.append(array)
    return array


def _override_text(key: str, text: str) -> bytes:
    """As it is written into llama.cpp's struct, which has room for 127 bytes and a zero."""
    encoded = text.encode(errors="replace")
    if len(encoded) > 127 or b"\0" in encoded:
        raise _refusal(f"kv_overrides with a {key[:40]!r} that is too long: use up to 127 bytes")
    return encoded


def _buffer_overrides(values: Mapping[str, object]) -> Iterable[tuple[str, str]]:
    """Pairs of tensor name pattern and buffer type name, from the plain forms."""
    given = values.get("override_tensor")
    if given is not None:
        items = given.split(",") if isinstance(given, str) else given
        if not isinstance(items, Iterable):
            raise _refusal(f"override_tensor = {given!r}: use PATTERN=BUFFER, such as exps=CPU")
        for item in items:
            pattern, _, buffer = str(item).rpartition("=")
            if not pattern or not buffer:
                raise _refusal(f"override_tensor = {item!r}: use PATTERN=BUFFER, such as exps=CPU")
            try:
                re.compile(pattern)
            except re.error as error:
                raise _refusal(f"override_tensor = {item!r}: {error}") from None
            yield pattern, buffer
    if not isinstance(values.get("cpu_moe", False), bool):
        raise _refusal(f"cpu_moe = {values['cpu_moe']!r}: use true or false")
    if values.get("cpu_moe"):
        yield _EXPERTS, "CPU"
    layers = values.get("n_cpu_moe", 0)
    if isinstance(layers, bool) or not isinstance(layers, int) or not 0 <= layers <= _MOST_LAYERS:
        raise _refusal(f"n_cpu_moe = {layers!r}: use a number of layers, 0 to {_MOST_LAYERS}")
    for layer in range(layers):
        yield rf"blk\.{layer}{_EXPERTS}", "CPU"


def _set_buffer_overrides(overrides: list[tuple[str, str]], params: Params) -> None:
    class Override(ctypes.Structure):
        _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))

    known = ggml.buffer_types()
    array = (Override * (len(overrides) + 1))()
    for entry, (pattern, buffer) in zip(array, overrides, strict=False):
        if buffer not in known:
            raise _refusal(
                f"override_tensor with the buffer type {buffer!r}: use one of {', '.join(known)}"
            )
        entry.pattern, entry.buft = pattern.encode(), known[buffer]
    params.keep.append(array)
    params.model.tensor_buft_overrides = ctypes.cast(array, ctypes.c_void_p)
