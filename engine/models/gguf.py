"""GGUF files: header, metadata, tensor directory and the block formats, in numpy alone.

Owns the byte layouts and their exact meaning as grouped affine codes. Leaves names, sharding and what a kernel makes
of the codes to `weights` and `quantized`. Torch-free, so that preparation can read metadata without a rank.
Source of the layouts: the GGUF specification and ggml's block structures.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.models.errors import WeightsError

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
PLAIN = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class Grouped:
    """A quantised matrix with exact meaning `codes * scales + zeros`, group by group along the input width.

    `codes`: uint8 [rows, width], below 2 ** `bits`. `scales`, `zeros`: float32 [rows, width / group].
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.float32]
    group: int
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> NDArray[np.float32]:
        """float32 [rows, width]. The product is exact in float32 for every format here; only the sum rounds."""
        rows, width = self.shape
        codes = self.codes.reshape(rows, width // self.group, self.group).astype(np.float32)
        codes *= self.scales[:, :, None]
        codes += self.zeros[:, :, None]
        return codes.reshape(rows, width)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A directory entry. `shape`: row-major, outermost first. `offset`: bytes from the start of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes, memory-mapped read-only."""
        entry = self.tensors[name]
        return np.memmap(self.path, dtype=np.uint8, mode="r", offset=entry.offset, shape=(entry.nbytes,))

    def blocks(self, name: str) -> Grouped:
        """A quantised tensor as grouped codes. Raises WeightsError for a plain one."""
        entry = self.tensors[name]
        if entry.type not in _FORMATS:
            raise WeightsError(f"{self.path.name}: tensor {name} has type {entry.type}, which isn't quantised")
        layout = _FORMATS[entry.type]
        rows = math.prod(entry.shape[:-1])
        raw = np.asarray(self.raw(name)).reshape(rows * entry.shape[-1] // layout.block, layout.nbytes)
        codes, scales, zeros = layout.unpack(raw)
        width = entry.shape[-1]
        return Grouped(
            np.ascontiguousarray(codes.reshape(rows, width)),
            scales.astype(np.float32).reshape(rows, width // layout.group),
            zeros.astype(np.float32).reshape(rows, width // layout.group),
            layout.group,
            layout.bits,
        )


class _Cursor:
    """Reads little-endian values, failing clearly where the file ends early."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, count: int) -> memoryview:
        if count < 0 or self.at + count > len(self.data):
            raise WeightsError(f"{self.path.name} is truncated: its header ends at byte {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        try:
            return bytes(self.take(self.scalar("Q"))).decode("utf-8")
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self.path.name} is corrupt: a name at byte {self.at} isn't UTF-8") from error

    def texts(self, count: int) -> list[str]:
        """`count` strings, in one tight loop: a vocabulary and its merges are hundreds of thousands."""
        data, at, end, found = self.data, self.at, len(self.data), []
        length = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                stop = at + 8 + length(data, at)[0]
                if stop > end:
                    raise WeightsError(f"{self.path.name} is truncated: its header ends at byte {end}")
                found.append(str(data[at + 8 : stop], "utf-8"))
                at = stop
        except struct.error as error:
            raise WeightsError(f"{self.path.name} is truncated: its header ends at byte {end}") from error
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self.path.name} is corrupt: a string at byte {at} isn't UTF-8") from error
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise WeightsError(f"{self.path.name} is corrupt: unknown metadata type {kind} at byte {self.at}")
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[inner]) if inner != 7 else np.dtype(np.bool_)
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        if inner == _STRING:
            return self.texts(count)
        return [self.value(inner) for _ in range(count)]


def read_gguf(path: Path) -> GgufFile:
    """Parses header, metadata and tensor directory; reads no tensor data. Raises WeightsError."""
    try:
        size = path.stat().st_size
        data = np.memmap(path, dtype=np.uint8, mode="r").data if size else memoryview(b"")
    except OSError as error:
        raise WeightsError(f"can't read {path}: {error.strerror}") from error
    cursor = _Cursor(path, data)
    if size < 24 or bytes(cursor.take(4)) != MAGIC:
        raise WeightsError(f"{path.name} isn't a GGUF file: it doesn't begin with 'GGUF'")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise WeightsError(f"{path.name} has GGUF version {version}; 2 and 3 are supported")
    tensor_count, pair_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(pair_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar("I"))
    entries = [_directory_entry(cursor) for _ in range(tensor_count)]
    alignment = int(metadata.get("general.alignment", 32)) or 32
    start = -(-cursor.at // alignment) * alignment
    return GgufFile(path, metadata, {entry[0]: _locate(path, size, start, *entry) for entry in entries})


def _directory_entry(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.text()
    dims = cursor.scalar("I")
    if dims > 4:
        raise WeightsError(f"{cursor.path.name} is corrupt: tensor {name} has {dims} dimensions")
    shape = tuple(reversed([cursor.scalar("Q") for _ in range(dims)]))
    kind, offset = cursor.scalar("I"), cursor.scalar("Q")
    return name, kind, shape, offset


def _locate(path: Path, size: int, start: int, name: str, kind: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
    label = _TYPE_NAMES.get(kind, f"number {kind}")
    count = math.prod(shape)
    if label in PLAIN:
        nbytes = count * PLAIN[label]
    elif label in _FORMATS:
        layout = _FORMATS[label]
        if not shape or shape[-1] % layout.block:
            raise WeightsError(f"{path.name}: tensor {name} ({label}) has a row that isn't whole blocks: {shape}")
        nbytes = count // layout.block * layout.nbytes
    else:
        supported = ", ".join([*PLAIN, *_FORMATS])
        raise WeightsError(f"{path.name}: tensor {name} has unsupported type {label}; supported: {supported}")
    if start + offset + nbytes > size:
        raise WeightsError(
            f"{path.name} is truncated: tensor {name} ends at byte {start + offset + nbytes}, the file at {size}"
        )
    return GgufTensor(name, label, shape, start + offset, nbytes)


Unpacked = tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class _Format:
    """`block` weights in `nbytes` bytes; scales hold for `group` weights; codes have `bits` bits."""

    block: int
    nbytes: int
    group: int
    bits: int
    unpack: Callable[[NDArray[np.uint8]], Unpacked]


def _half(raw: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """The float16 at byte `at` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Low nibbles first, then high ones: [blocks, bytes] → [blocks, 2 * bytes]."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _q4_0(raw: NDArray[np.uint8]) -> Unpacked:
    scale = _half(raw, 0)
    return _nibbles(raw[:, 2:]), scale, scale * np.float32(-8)


def _q4_1(raw: NDArray[np.uint8]) -> Unpacked:
    return _nibbles(raw[:, 4:]), _half(raw, 0), _half(raw, 2)


def _q5_0(raw: NDArray[np.uint8]) -> Unpacked:
    scale = _half(raw, 0)
    fifth = np.unpackbits(raw[:, 2:6], axis=1, bitorder="little")
    return (_nibbles(raw[:, 6:]) | (fifth << 4)).astype(np.uint8), scale, scale * np.float32(-16)


def _q5_1(raw: NDArray[np.uint8]) -> Unpacked:
    fifth = np.unpackbits(raw[:, 4:8], axis=1, bitorder="little")
    return (_nibbles(raw[:, 8:]) | (fifth << 4)).astype(np.uint8), _half(raw, 0), _half(raw, 2)


def _q8_0(raw: NDArray[np.uint8]) -> Unpacked:
    scale = _half(raw, 0)
    return raw[:, 2:] ^ np.uint8(128), scale, scale * np.float32(-128)  # xor: two's complement plus 128


def _k_scales(raw: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and zeros of the eight groups of Q4_K and Q5_K: six bits each in twelve bytes, under two factors."""
    packed = raw[:, 4:16]
    low, high, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    sixths = np.concatenate((low & 63, (rest & 15) | (low >> 6 << 4)), axis=1).astype(np.float32)
    minima = np.concatenate((high & 63, (rest >> 4) | (high >> 6 << 4)), axis=1).astype(np.float32)
    scales: NDArray[np.float32] = (_half(raw, 0) * sixths).astype(np.float32)
    zeros: NDArray[np.float32] = (-(_half(raw, 2) * minima)).astype(np.float32)
    return scales, zeros


def _crumbs(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two-bit codes: 32 bytes hold 128 of them, those of the lowest bits first: [blocks, 64] → [blocks, 256]."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    return (packed.reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 256).astype(np.uint8)


def _bit_planes(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """One bit of each code: 32 bytes hold a plane of 32 codes a bit, the lowest first: [blocks, 32] → [blocks, 256]."""
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    return (packed[:, None, :] >> shifts & 1).reshape(-1, 256).astype(np.uint8)


def _q2_k(raw: NDArray[np.uint8]) -> Unpacked:
    scales: NDArray[np.float32] = (_half(raw, 80) * (raw[:, :16] & 15)).astype(np.float32)
    zeros: NDArray[np.float32] = (-(_half(raw, 82) * (raw[:, :16] >> 4))).astype(np.float32)
    return _crumbs(raw[:, 16:80]), scales, zeros


def _q3_k(raw: NDArray[np.uint8]) -> Unpacked:
    packed = raw[:, 96:108]
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 4, 1)
    high = (packed[:, None, 8:] >> shifts & 3).reshape(-1, 16)
    sixths = (_nibbles(packed[:, :8]) | (high << 4)).astype(np.float32) - 32
    scales: NDArray[np.float32] = (_half(raw, 108) * sixths).astype(np.float32)
    codes = _crumbs(raw[:, 32:96]) | (_bit_planes(raw[:, :32]) << 2)
    return codes.astype(np.uint8), scales, (scales * np.float32(-4)).astype(np.float32)


def _q4_k(raw: NDArray[np.uint8]) -> Unpacked:
    scales, zeros = _k_scales(raw)
    return _nibbles(raw[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256).astype(np.uint8), scales, zeros


def _q5_k(raw: NDArray[np.uint8]) -> Unpacked:
    scales, zeros = _k_scales(raw)
    codes = _nibbles(raw[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256) | (_bit_planes(raw[:, 16:48]) << 4)
    return codes.astype(np.uint8), scales, zeros


def _q6_k(raw: NDArray[np.uint8]) -> Unpacked:
    low = raw[:, :128].reshape(-1, 2, 2, 32)
    high = raw[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    nibbles = np.concatenate((low & 15, low >> 4), axis=2)
    codes = (nibbles | ((high >> shifts & 3) << 4)).reshape(-1, 256).astype(np.uint8)
    sixteenths = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32)
    scales: NDArray[np.float32] = (_half(raw, 208) * sixteenths).astype(np.float32)
    return codes, scales, (scales * np.float32(-32)).astype(np.float32)


_FORMATS = {
    "Q4_0": _Format(32, 18, 32, 4, _q4_0),
    "Q4_1": _Format(32, 20, 32, 4, _q4_1),
    "Q5_0": _Format(32, 22, 32, 5, _q5_0),
    "Q5_1": _Format(32, 24, 32, 5, _q5_1),
    "Q8_0": _Format(32, 34, 32, 8, _q8_0),
    "Q2_K": _Format(256, 84, 16, 2, _q2_k),
    "Q3_K": _Format(256, 110, 16, 3, _q3_k),
    "Q4_K": _Format(256, 144, 32, 4, _q4_k),
    "Q5_K": _Format(256, 176, 32, 5, _q5_k),
    "Q6_K": _Format(256, 210, 16, 6, _q6_k),
}
QUANTIZED = tuple(_FORMATS)
_PAIRS = dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
FACTORS = {**dict.fromkeys(QUANTIZED, (0,)), **_PAIRS, "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
"""Byte offsets of the float16 factors in a block, by format."""
