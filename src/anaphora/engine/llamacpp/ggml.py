"""The few facts about devices that llama.cpp's own API doesn't tell, from ggml's."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import llama_cpp
import psutil
from llama_cpp._ctypes_extensions import load_shared_library

_folder = Path(llama_cpp.__file__).parent / "lib"
_base = load_shared_library("ggml-base", _folder)
_registry = load_shared_library("ggml", _folder)

_registry.ggml_backend_dev_count.restype = ctypes.c_size_t
_registry.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
_registry.ggml_backend_dev_get.restype = ctypes.c_void_p
_base.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
_base.ggml_backend_dev_type.restype = ctypes.c_int
_base.ggml_backend_dev_memory.argtypes = [
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
]
_base.ggml_backend_dev_buffer_type.argtypes = [ctypes.c_void_p]
_base.ggml_backend_dev_buffer_type.restype = ctypes.c_void_p
_base.ggml_backend_buft_name.argtypes = [ctypes.c_void_p]
_base.ggml_backend_buft_name.restype = ctypes.c_char_p

_GPU = 1


def _devices() -> list[int]:
    return [_registry.ggml_backend_dev_get(i) for i in range(_registry.ggml_backend_dev_count())]


def free_gpu_memory() -> int:
    """Bytes free on all GPUs together; 0 without any."""
    total = 0
    for device in _devices():
        if _base.ggml_backend_dev_type(device) == _GPU:
            free, size = ctypes.c_size_t(), ctypes.c_size_t()
            _base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(size))
            total += free.value
    return total


def buffer_types() -> dict[str, int]:
    """Default buffer type of every device, by ggml's name for it (``CPU``, ``CUDA0``, ...)."""
    types = [_base.ggml_backend_dev_buffer_type(device) for device in _devices()]
    return {_base.ggml_backend_buft_name(kind).decode(): kind for kind in types}


def default_threads() -> int:
    """Physical cores this process may use; llama.cpp gains nothing from more."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
