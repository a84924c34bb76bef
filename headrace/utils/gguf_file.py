# SPDX-License-Identifier: Apache-2.0
"""The GGUF container: a header of typed keys, a table of tensors, then their bytes. No torch.

The `gguf` package's reader is not used for the header: it takes 3 s for a 49,152 token vocabulary, this takes 0.1 s.
Its tables of tensor types and block sizes are.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from headrace.errors import ModelLoadError
from headrace.utils.math import round_up

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. shape: logical, [out, in]. kind: the type's name, such as "Q4_1"."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed header and the table of tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def read(self, tensor: GgufTensor) -> np.ndarray[Any, Any]:
        """The tensor's bytes, mapped (writes stay private): uint8 [rows, bytes per row] ([1, n] for a vector)."""
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        data = np.memmap(self.path, dtype=np.uint8, mode="c", offset=tensor.offset, shape=(tensor.nbytes,))
        view: np.ndarray[Any, Any] = data.reshape(rows, -1)
        return view


class _Cursor:
    """Reads little-endian values one after another; running past the end is a truncated file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def take(self, n: int) -> int:
        """Advance by n bytes; the position before."""
        start = self.at
        if n < 0 or start + n > len(self.data):
            raise ModelLoadError(f"{self.path} is truncated: its header does not end within {len(self.data)} bytes")
        self.at = start + n
        return start

    def unpack(self, layout: str) -> Any:
        return struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        n = self.unpack("<Q")
        start = self.take(n)
        return self.data[start : start + n].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, n = self.unpack("<I"), self.unpack("<Q")
            if item in _SCALARS:
                return self.scalars(_SCALARS[item], n).tolist()
            return self.strings(n) if item == _STRING else [self.value(item) for _ in range(n)]
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self.path} has a header value of type {kind}, which GGUF does not define")
        return self.scalars(_SCALARS[kind], 1)[0].item()

    def scalars(self, dtype: np.dtype[Any], n: int) -> np.ndarray[Any, Any]:
        start = self.take(n * dtype.itemsize)
        return np.frombuffer(self.data[start : self.at], dtype)

    def strings(self, n: int) -> list[str]:
        data, at, out = self.data, self.at, []
        length: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        end = len(data)
        for _ in range(n):
            if at + 8 > end:
                self.take(end)
            size = length(data, at)[0]
            at += 8 + size
            if at > end:
                self.take(end)
            out.append(data[at - size : at].decode("utf-8", errors="replace"))
        self.at = at
        return out


def read_gguf(path: Path) -> GgufFile:
    """Parse a file's header and tensor table; every tensor is checked to lie inside the file.

    Raises ModelLoadError for a file that is no GGUF, has another version or byte order, or is truncated.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                raise ModelLoadError(f"{path} is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(path, data))
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error


def _parse(cursor: _Cursor) -> GgufFile:
    path = cursor.path
    cursor.take(len(MAGIC))
    version = cursor.unpack("<I")
    if version not in (2, 3):
        order = " (it is in big-endian order)" if version > 0xFFFF else ""
        raise ModelLoadError(f"{path} has GGUF version {version}{order}; little-endian versions 2 and 3 can be read")
    num_tensors, num_keys = cursor.unpack("<Q"), cursor.unpack("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.unpack("<I"))
    table = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelLoadError(f"{path} has general.alignment = {alignment!r}; it must be a whole number of at least 1")
    start = round_up(cursor.at, alignment)
    tensors = {entry.name: entry for entry in (_placed(cursor, start, *row) for row in table)}
    return GgufFile(path, metadata, tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dims = [cursor.unpack("<Q") for _ in range(cursor.unpack("<I"))]
    return name, tuple(reversed(dims)), cursor.unpack("<I"), cursor.unpack("<Q")


def _placed(cursor: _Cursor, start: int, name: str, shape: tuple[int, ...], code: int, offset: int) -> GgufTensor:
    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        raise ModelLoadError(f"{cursor.path}: tensor {name} has the unknown GGUF type {code}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    count = 1
    for size in shape:
        count *= size
    if not shape or shape[-1] % block:
        raise ModelLoadError(f"{cursor.path}: tensor {name} of shape {shape} cannot be of type {kind.name}")
    nbytes = count // block * block_bytes
    missing = start + offset + nbytes - len(cursor.data)
    if missing > 0:
        raise ModelLoadError(f"{cursor.path} is truncated: tensor {name} ends {missing:,} bytes after the file does")
    return GgufTensor(name, shape, kind.name, start + offset, nbytes)
