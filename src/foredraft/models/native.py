"""Loads the C kernels (`csrc/kernels.c`) for this machine's instruction set.

`FOREDRAFT_NATIVE=0` switches them off, `FOREDRAFT_AMX=0` only those for Intel's tile unit; `why_not` says what keeps
them from being used. They run on torch's own OpenMP threads, since torch's libgomp is already in the process when they
are loaded.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class BatchStruct(ctypes.Structure):
    """`Batch` of kernels.c."""

    _fields_ = (
        ("query_start", _POINTER),
        ("seq_lens", _POINTER),
        ("tables", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("tree", _POINTER),
        ("table_stride", _LONG),
        ("tree_stride", _LONG),
        ("requests", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", _FLOAT),
    )


class MatrixStruct(ctypes.Structure):
    """`Matrix` of layer.c."""

    _fields_ = (("w", _POINTER), ("bias", _POINTER), ("gemm", _POINTER), ("n", ctypes.c_int32), ("k", ctypes.c_int32))


class LayerStruct(ctypes.Structure):
    """`Layer` of layer.c."""

    _fields_ = (
        ("input_norm", _POINTER),
        ("post_norm", _POINTER),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("qkv", MatrixStruct),
        ("output", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("attention", _POINTER),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("half", ctypes.c_int32),
        ("eps", _FLOAT),
    )


_BATCH = ctypes.POINTER(BatchStruct)
_GEMM = [_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _INT, _INT, _INT, _INT]
_PACK = [_POINTER, _POINTER, _INT, _INT]
_ROWS = [_POINTER, _POINTER, _POINTER, _INT, _INT]
_ATTENTION = [_BATCH, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER, _POINTER]
_SIGNATURES = {
    "fd_gemm_f32": _GEMM,
    "fd_gemm_bf16": _GEMM,
    "fd_pack_f32": _PACK,
    "fd_pack_bf16": _PACK,
    "fd_rows_f32": _ROWS,
    "fd_rows_bf16": _ROWS,
    "fd_rms_norm": [_POINTER, _LONG, _POINTER, _POINTER, _INT, _INT, _INT, _FLOAT, _INT],
    "fd_silu_mul": [_POINTER, _POINTER, _INT, _INT, _INT],
    "fd_rope": [_POINTER, _LONG, _POINTER, _POINTER, _INT, _INT, _INT, _INT],
    "fd_layer": [ctypes.POINTER(LayerStruct), _BATCH, *[_POINTER] * 8, _INT, _INT],
    "fd_attention_f32": _ATTENTION,
    "fd_attention_bf16": _ATTENTION,
}

_AMX_SIGNATURES = {"fd_gemm_amx": _GEMM, "fd_pack_amx": _PACK, "fd_rows_amx": _ROWS}
AMX = "amx"
"""Suffix of the matrix kernels for Intel's tile unit, on weights in bfloat16."""

SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""The storage types that kernels exist for."""


def _level() -> str:
    return {"AVX2": "v3", "AVX512": "v4"}.get(torch.backends.cpu.get_cpu_capability(), "base")


def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("FOREDRAFT_NATIVE") == "0":
        return None, "switched off by FOREDRAFT_NATIVE=0"
    found = sorted(Path(__file__).parent.glob(f"_cpu_{_level()}.*so"))
    if not found:
        capability = torch.backends.cpu.get_cpu_capability()
        return None, f"not built for this processor ({capability}): install a C compiler, then foredraft again"
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as error:
        return None, f"{found[0].name} does not load: {error}"
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    sizes = ["fd_packed_size"]
    if hasattr(library, "fd_gemm_amx"):
        for name, arguments in _AMX_SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        sizes.append("fd_packed_size_amx")
    for name in sizes:
        function = getattr(library, name)
        function.argtypes, function.restype = [_INT, _INT], _LONG
    return library, ""


_library, why_not = _load()


def available() -> bool:
    """Whether the kernels can be used on this machine."""
    return _library is not None


@functools.cache
def has_amx() -> bool:
    """Whether this process may use the tile unit; `FOREDRAFT_AMX=0` says no."""
    if _library is None or not hasattr(_library, "fd_gemm_amx") or os.environ.get("FOREDRAFT_AMX") == "0":
        return False
    return bool(_library.fd_amx_available())


def address(name: str) -> int:
    """Where a kernel lies in memory, for other kernels to call."""
    return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0


def library() -> ctypes.CDLL:
    """The loaded kernels; only when `available`."""
    assert _library is not None, why_not
    return _library
