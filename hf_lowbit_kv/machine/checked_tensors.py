"""Tensors in a safetensors file with a checksum of each, written at once and read in a stream.

A file is read through two buffers (of pinned memory on the way to a GPU): while one is copied to its tensor and summed up, the
other one is filled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from safetensors.torch import save_file

#: bytes of a buffer
BUFFER = 2**25


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Write tensors of the CPU. Checksums (xxh3_128, hexadecimal) by name, and that of the file's header by `""`."""
    save_file(dict(tensors), path)
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = xxhash.xxh3_128_hexdigest(file.read(length))
    return {"": header} | {name: xxhash.xxh3_128_hexdigest(_bytes(tensor)) for name, tensor in tensors.items()}


def read_tensors(path: Path, checksums: Mapping[str, str], device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a file, on `device`.

    Raises:
        ValueError: truncated or altered; names the tensor.
    """
    with path.open("rb") as file:
        header = _header(file, checksums[""], path)
        start, size = file.tell(), path.stat().st_size
        end = max([entry["data_offsets"][1] for entry in header.values()], default=0)
        if size != start + end:
            raise ValueError(f"{path} is truncated or has grown: it has {size} bytes, and was saved with {start + end}")
        out = {}
        with _Stream(file, device) as stream:
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                out[name] = stream.read(entry)
                stream.expect(name, checksums[name], path)
            stream.check()
    return out


def _header(file: BinaryIO, checksum: str, path: Path) -> dict[str, Any]:
    begin = file.read(8)
    length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else -1
    text = file.read(length) if 0 <= length <= path.stat().st_size else b""
    if len(text) != length or xxhash.xxh3_128_hexdigest(text) != checksum:
        raise ValueError(f"{path} was truncated or altered: its header is not what was saved")
    return {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}


class _Stream:
    """Reads tensors one behind the other; checksums are computed by a thread."""

    def __init__(self, file: BinaryIO, device: torch.device):
        self.file, self.device = file, device
        self.staged = device.type == "cuda"
        self._pool = ThreadPoolExecutor(1)
        self._buffers = [torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True) for _ in range(2 * self.staged)]
        self._busy: list[tuple[Any, Future] | None] = [None, None]
        self._next = 0
        self._sums: list[tuple[str, str, Path, Any, list[Future]]] = []
        self._sum, self._pending = xxhash.xxh3_128(), list[Future]()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        self._pool.shutdown(wait=True)

    def read(self, entry: Mapping[str, Any]) -> torch.Tensor:
        dtype = _DTYPES[entry["dtype"]]
        first, last = entry["data_offsets"]
        self._sum, self._pending = xxhash.xxh3_128(), []
        flat = torch.empty(last - first, dtype=torch.uint8, device=self.device)
        for at in range(0, last - first, BUFFER):
            part = flat[at : at + BUFFER]
            if self.staged:
                self._through_buffer(part)
            else:
                content = _bytes(part)
                self._fill(content)
                self._pending.append(self._pool.submit(self._sum.update, content))
        return flat.view(dtype).view(entry["shape"])

    def _through_buffer(self, part: torch.Tensor) -> None:
        index, self._next = self._next, 1 - self._next
        if (busy := self._busy[index]) is not None:
            busy[0].synchronize()
            busy[1].result()
        buffer = self._buffers[index][: len(part)]
        content = _bytes(buffer)
        self._fill(content)
        part.copy_(buffer, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))
        self._pending.append(self._pool.submit(self._sum.update, content))
        self._busy[index] = copied, self._pending[-1]

    def _fill(self, content: memoryview) -> None:
        done = 0
        while done < len(content):
            if not (count := self.file.readinto(content[done:])):  # type: ignore[attr-defined]
                raise ValueError(f"{self.file.name} is truncated")
            done += count

    def expect(self, name: str, checksum: str, path: Path) -> None:
        """The tensor that was read last is to have this checksum. Those before it are looked at now."""
        self.check()
        self._sums.append((name, checksum, path, self._sum, self._pending))

    def check(self) -> None:
        for name, checksum, path, found, pending in self._sums:
            for each in pending:
                each.result()
            if found.hexdigest() != checksum:
                raise ValueError(f"{path} was altered: {name} is not what was saved")
        self._sums.clear()


def _bytes(tensor: torch.Tensor) -> memoryview:
    content: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
}
