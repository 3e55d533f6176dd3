"""From a model file and settings to a running llama.cpp engine."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import psutil
from llama_cpp import llama_cpp as lib

from anaphora.cache.disk import DiskTier, namespace_name
from anaphora.cache.keys import root_key
from anaphora.cache.store import PrefixCache
from anaphora.clock import Clock, SystemClock
from anaphora.engine.identity import check_complete
from anaphora.engine.llamacpp import ggml, logs
from anaphora.engine.llamacpp.context import GRID, LlamaContext
from anaphora.engine.llamacpp.engine import LlamaEngine
from anaphora.engine.llamacpp.model import LlamaModel, reason
from anaphora.engine.llamacpp.params import KV_TYPES, Params, build, rope_identity
from anaphora.engine.llamacpp.vocabulary import LoadedVocabulary
from anaphora.engine.protocol import Emit, EngineInfo
from anaphora.errors import CacheBusyError, ContextMemoryError, ModelFileError, SettingsError
from anaphora.settings import Settings

logger = logging.getLogger(__name__)

EPOCH = "1"
"""Raised when blocks written before must not be used any more."""

_IDLE_SEQUENCES = 48
_STAGED_BLOCKS = 8
_BLOCK_OVERHEAD = 128 << 10
_TYPE_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q4_0": 18 / 32,
    "q4_1": 20 / 32,
    "q5_0": 22 / 32,
    "q5_1": 24 / 32,
    "q8_0": 34 / 32,
    "iq4_nl": 18 / 32,
}
assert _TYPE_BYTES.keys() == KV_TYPES.keys()


def load_engine(
    path: Path, settings: Settings, emit: Emit, clock: Clock | None = None
) -> LlamaEngine:
    """Load the model at ``path`` with its context and its cache.

    Raises:
        ModelNotFoundError, ModelFileError: the file is missing or can't be used.
        SettingsError: settings that can't work, for any model or for this one.
        ContextMemoryError: not enough memory for the context.
        CacheDirectoryError: the cache folder can't be used.
    """
    clock = clock or SystemClock()
    logs.route()
    lib.llama_backend_init()
    params = build(settings)
    micro = int(params.context.n_ubatch)
    if settings.exact and micro % GRID:
        raise SettingsError(
            f"has n_ubatch = {micro}: use a multiple of {GRID} with exact", setting="llama"
        )
    model = LlamaModel(path, params, settings.adapters, altered=bool(settings.llama))
    try:
        if not model.decodes:
            raise ModelFileError(
                f"{path} is a model of the kind {model.architecture!r}, which generates no text: "
                "use a language model"
            )
        return _assemble(model, params, settings, emit, clock)
    except BaseException:
        model.close()
        raise


def load_vocabulary(path: Path, settings: Settings) -> LoadedVocabulary:
    """The vocabulary alone of the model at ``path``, without its weights; close it after use.

    Raises :class:`~anaphora.errors.ModelNotFoundError` and
    :class:`~anaphora.errors.ModelFileError`.
    """
    logs.route()
    lib.llama_backend_init()
    params = build(settings)
    params.model.vocab_only = True
    check_complete(path)
    with logs.errors() as errors:
        pointer = lib.llama_model_load_from_file(str(path).encode(), params.model)
    if not pointer:
        raise ModelFileError(f"{path} can't be loaded: {reason(errors)}; try another file")
    return LoadedVocabulary(pointer)


def identity(model: LlamaModel, params: Params, settings: Settings) -> dict[str, str]:
    """Everything besides tokens and salts that a block's bytes depend on.

    Not the context's size, parallelism, threads, batch size or package version: those change no
    bytes, or only within the kernels' own noise. ``exact`` promises more than that, so it adds
    the build and the CPU's features.
    """
    found = {
        "epoch": EPOCH,
        "engine": "llama.cpp",
        "state version": str(lib.LLAMA_STATE_SEQ_VERSION),
        "model": model.digest,
        "type k": params.type_k,
        "type v": params.type_v,
        "flash attention": str(params.flash_attn),
        "adapters": " ".join(sorted(f"{digest}@{scale}" for _, scale, digest in model.adapters)),
        "metadata overrides": repr(
            sorted(dict(settings.llama.get("kv_overrides") or {}).items())  # type: ignore[call-overload]
        ),
        **rope_identity(params),
    }
    if settings.exact:
        found["exact"] = f"{lib.llama_version().decode()} {lib.llama_print_system_info().decode()}"
    return found


def _assemble(
    model: LlamaModel, params: Params, settings: Settings, emit: Emit, clock: Clock
) -> LlamaEngine:
    warnings: list[str] = []
    caching = model.kind == "attention"
    if not caching:
        warnings.append(
            f"{model.name} is a {model.kind} model ({model.architecture}): it runs with the "
            "prompt cache off and one request at a time"
        )
    keys, values = model.kv_values_per_token()
    token_bytes = int(keys * _TYPE_BYTES[params.type_k] + values * _TYPE_BYTES[params.type_v])
    available = psutil.virtual_memory().available
    memory_budget = settings.memory_budget
    if memory_budget is None:
        memory_budget = available // 4
    room = ggml.free_gpu_memory() if _kv_on_gpu(params) else available - memory_budget
    parallel = settings.parallel if caching else 1
    context_size, cells = _fit(
        model, settings, token_bytes + _scratch_bytes(model, params), room, parallel
    )
    sequences = parallel + (_IDLE_SEQUENCES if caching else 0)
    sequences = min(sequences, int(lib.llama_max_parallel_sequences()) - 1)
    context = LlamaContext(model, params, cells, sequences, ranges=caching)
    try:
        token = model.vocabulary.bos
        context.warm_up(0 if token is None else token)
        cache, problem = _open_cache(
            model, params, settings, memory_budget, token_bytes, caching, clock
        )
    except BaseException:
        context.close()
        raise
    if problem:
        warnings.append(problem)
    for warning in warnings:
        logger.warning("%s", warning)
    budgets = cache.stats()
    info = EngineInfo(
        name="llama.cpp",
        model=model.name,
        kind=model.kind,
        caching=caching,
        context_size=context_size,
        cells=cells,
        bytes_per_token=token_bytes,
        memory_budget=budgets.memory_budget,
        disk_budget=budgets.disk_budget,
        chat_template=model.chat_template,
        warnings=tuple(warnings),
    )
    return LlamaEngine(
        info,
        model.vocabulary,
        context,
        cache,
        emit,
        clock,
        parallel=parallel,
        sequences=sequences,
        reserve_tokens=settings.reserve_tokens,
        block_size=settings.block_size,
        exact=settings.exact,
        flash_attn=params.flash_attn,
        on_close=model.close,
    )


def _kv_on_gpu(params: Params) -> bool:
    return (
        bool(lib.llama_supports_gpu_offload())
        and params.model.n_gpu_layers != 0
        and bool(params.context.offload_kqv)
    )


def _scratch_bytes(model: LlamaModel, params: Params) -> int:
    """Bytes of llama.cpp's compute buffer for every cell of the context.

    For each token of a batch it holds the mask over all cells, and without flash attention also
    the attention weights of every head.
    """
    rows = 1 if params.flash_attn else 1 + int(lib.llama_model_n_head(model.pointer))
    return 4 * int(params.context.n_ubatch) * rows


def _fit(
    model: LlamaModel, settings: Settings, cell_bytes: int, room: int, parallel: int
) -> tuple[int, int]:
    """Context size of one sequence, and cells for all together.

    Without a size given, a sequence gets what the model was trained for, as far as half of
    ``room`` (bytes) allows; cells for further parallel sequences come out of the same half.
    """
    most = room // 2 // max(1, cell_bytes)
    trained = model.context_length or 4096
    if settings.context_size is None:
        if most < 512:
            raise ContextMemoryError(
                f"only {room >> 20} MiB of memory are free, too little for a context of 512 "
                "tokens: close other programs or use a smaller model"
            )
        size = min(trained, most)
    else:
        size = settings.context_size
        if size * cell_bytes > room:
            raise ContextMemoryError(
                f"a context of {size} tokens needs {size * cell_bytes >> 20} MiB and "
                f"{room >> 20} MiB are free: use a smaller context, or q8_0 as KV type"
            )
    return size, max(size, min(size * parallel, most))


def _open_cache(
    model: LlamaModel,
    params: Params,
    settings: Settings,
    memory_budget: int,
    token_bytes: int,
    caching: bool,
    clock: Clock,
) -> tuple[PrefixCache, str | None]:
    """The cache, and a warning where it has to do without its disk tier.

    Blocks pass through memory on their way to and from the disk, so with a disk tier the memory
    tier has room for a few of them whatever its budget.
    """
    found = identity(model, params, settings)
    root, disk, problem = root_key(found), None, None
    if caching and settings.cache_dir is not None:
        folder = Path(settings.cache_dir).expanduser()
        try:
            disk = DiskTier.open(
                folder,
                root,
                found,
                _disk_budget(settings, folder, root),
                clock,
                model.name,
            )
        except CacheBusyError as error:
            problem = f"{error}; this process caches in memory only"
    if not caching:
        memory_budget = 0
    elif disk is not None:
        block_bytes = token_bytes * settings.block_size + _BLOCK_OVERHEAD
        memory_budget = max(memory_budget, _STAGED_BLOCKS * block_bytes)
    cache = PrefixCache(
        root,
        memory_budget=memory_budget,
        disk=disk,
        block_size=settings.block_size,
        clock=clock,
    )
    return cache, problem


def _disk_budget(settings: Settings, folder: Path, root: bytes) -> int:
    """Bytes for this namespace; what it holds already counts as free, or it would shrink."""
    if settings.disk_budget is not None:
        return settings.disk_budget
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    files = (folder / namespace_name(root) / "blocks").glob("*/*")
    held = sum(file.lstat().st_size for file in files)
    return min((shutil.disk_usage(existing).free + held) // 2, 64 << 30)
