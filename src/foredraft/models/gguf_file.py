"""Reads a GGUF file's metadata and tensor table; its quantised tensors stay where they are until asked for.

The `gguf` package's own reader makes a numpy view of every string of the vocabulary, which takes seconds;
this one follows the same format (GGUF 2 and 3, little-endian) and says where a truncated file ends.
Dequantisation is gguf's.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from foredraft.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
_CHUNK_ELEMENTS = (1 << 15) - 1
"""Elements converted at once: they stay in the processor's cache, and are too few for torch to start threads, whose
waiting for each other on a busy machine would take several times as long as the work."""


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies.

    Args:
        shape: outermost dimension first, as in torch.
        kind: its quantisation.
        offset, nbytes: within the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file: `metadata` by key, `tensors` by name.

    Raises:
        ModelError: not a GGUF file, an unsupported version, damaged or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be opened as GGUF: {error}") from error
        with self._data:
            self._read_checked_header()

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """One tensor, dequantised to `dtype`; shape as in `tensors`."""
        tensor = torch.empty(self.tensors[name].shape, dtype=dtype)
        self.fill(name, tensor)
        return tensor

    def fill(self, name: str, out: Tensor) -> None:
        """Dequantises one tensor into `out` of its shape, a few rows at a time."""
        tensor = self.tensors[name]
        rows = out.reshape(-1, out.shape[-1]) if out.dim() else out.reshape(1, 1)
        num_rows, columns = rows.shape
        row_bytes = tensor.nbytes // num_rows
        step = max(1, _CHUNK_ELEMENTS // columns)
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            for begin in range(0, num_rows, step):
                end = min(begin + step, num_rows)
                raw = np.frombuffer(file.read((end - begin) * row_bytes), dtype=np.uint8)
                rows[begin:end] = self._converted(tensor, raw).reshape(end - begin, columns)

    def _converted(self, tensor: GGUFTensor, raw: np.ndarray) -> Tensor:
        if tensor.kind in _PLAIN:
            return torch.from_numpy(raw.view(_PLAIN[tensor.kind]).copy())
        try:
            # As one long row: gguf works through short rows sixteen at a time, which costs more than the arithmetic.
            return torch.from_numpy(gguf.quants.dequantize(raw[None], tensor.kind)[0])
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: {tensor.name} has quantisation {tensor.kind.name}, which gguf cannot decode"
            ) from error

    def _read_checked_header(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file (it starts with {self._data[:4]!r})")
        self._at = 4
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError, ValueError, KeyError) as error:
            raise ModelError(
                f"{self.path}: damaged or truncated near byte {self._at} of {len(self._data)} ({error}); "
                "download it again"
            ) from error

    def _read_header(self) -> None:
        (version,) = self._unpack("I")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported (2 and 3 are, little-endian)")
        num_tensors, num_keys = self._unpack("QQ")
        for _ in range(num_keys):
            key = self._string()
            (kind,) = self._unpack("I")
            self.metadata[key] = self._value(kind)
        table = [self._tensor_info() for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in table:
            block, block_bytes = gguf.constants.GGML_QUANT_SIZES[kind]
            count = math.prod(shape)
            if shape and shape[-1] % block:
                raise ValueError(f"{name} has rows of {shape[-1]} elements, not whole blocks of {block}")
            tensor = GGUFTensor(name, shape, kind, start + offset, count // block * block_bytes)
            end = tensor.offset + tensor.nbytes
            if end > len(self._data):
                raise ModelError(
                    f"{self.path}: truncated: tensor {name} ends at byte {end}, the file at "
                    f"{len(self._data)}; download it again"
                )
            self.tensors[name] = tensor

    def _tensor_info(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        name = self._string()
        (num_dims,) = self._unpack("I")
        dims = self._unpack(f"{num_dims}Q")
        kind, offset = self._unpack("IQ")
        return name, tuple(reversed(dims)), gguf.GGMLQuantizationType(kind), offset

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self._at)
        self._at += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        end = self._at + length
        if end > len(self._data):
            raise ValueError(f"a string of {length} bytes runs past the end")
        text = self._data[self._at : end].decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, length = self._unpack("IQ")
            if item_kind in _SCALARS:
                return list(self._unpack(f"{length}{_SCALARS[item_kind]}"))
            return [self._value(item_kind) for _ in range(length)]
        raise ValueError(f"unknown value type {kind}")
