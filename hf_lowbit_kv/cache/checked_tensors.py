"""Tensors in a safetensors file, each with a checksum. One call writes the file, and several threads read it.

A thread reads a tensor in pieces and updates its checksum. On the way to a GPU the pieces go through buffers of pinned
memory: while one is copied, the next one is filled.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file

#: largest number of threads: a single one is slower than the copy to a GPU
WORKERS = 8
#: bytes that are read, checked and copied at a time
PIECE = 2**22
#: buffers of a thread
BUFFERS = 3


class UninterpretableError(ValueError):
    """Files are as they were written, but this release cannot interpret them."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> dict[str, str]:
    """Write tensors that are on the CPU. Returns their checksums (xxh3_128, hexadecimal) by name; that of the file's
    header, with `metadata`, has the name `""`.

    Raises:
        OSError: the file cannot be written, e.g. to a full disk.
    """
    path.touch()
    mode = path.stat().st_mode  # safetensors replaces the file by one that only its owner can read
    try:
        save_file(dict(tensors), path, metadata)
        path.chmod(mode)
    except SafetensorError as error:  # it has no class for what the system refuses
        if "I/O error" not in str(error):
            raise
        raise OSError(f"tensors cannot be written to {str(path.parent)!r}: {error}") from error
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = xxhash.xxh3_128_hexdigest(file.read(length))
    return {"": header} | {name: xxhash.xxh3_128_hexdigest(_bytes(tensor)) for name, tensor in tensors.items()}


def read_tensors(
    file: FileIO, checksums: Mapping[str, str], device: torch.device, description: str
) -> dict[str, torch.Tensor]:
    """The tensors of a file, on `device`. On a GPU they arrive in its current stream. The file may be removed meanwhile:
    it is not opened again.

    Args:
        description: must be that of the file's metadata; files of earlier releases have none.

    Raises:
        ValueError: truncated or altered; names the tensor. UninterpretableError: it has another description.
    """
    path, size = Path(file.name), os.fstat(file.fileno()).st_size
    file.seek(0)
    header = _header(file, checksums[""], path, size)
    if header.pop("__metadata__", {}).get("description", description) != description:
        raise UninterpretableError(f"{path} belongs to another description")
    start = file.tell()
    end = max([entry["data_offsets"][1] for entry in header.values()], default=0)
    if size != start + end:
        raise ValueError(f"{path} is truncated or has grown: it has {size} bytes, and was saved with {start + end}")
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    out = {name: _empty(entry, device) for name, entry in entries}
    reader = _Reader(file, device)
    with ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
        sums = {name: pool.submit(reader.read, out[name], start + entry["data_offsets"][0]) for name, entry in entries}
        try:
            for name, checksum in sums.items():
                if checksum.result() != checksums[name]:
                    raise ValueError(f"{path} was altered: {name} is not what was saved")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return out


def _empty(entry: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """Memory for a tensor of a file."""
    first, last = entry["data_offsets"]
    flat = torch.empty(last - first, dtype=torch.uint8, device=device)
    return flat.view(_DTYPES[entry["dtype"]]).view(entry["shape"])


def _header(file: FileIO, checksum: str, path: Path, size: int) -> dict[str, Any]:
    begin = file.read(8)
    length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else -1
    text = file.read(length) if 0 <= length <= size else b""
    if len(text) != length or xxhash.xxh3_128_hexdigest(text) != checksum:
        raise ValueError(f"{path} was truncated or altered: its header is not what was saved")
    entries: dict[str, Any] = json.loads(text)
    return entries


class _Reader:
    """Fills tensors from a file. Threads share it; each thread has its own buffers if the tensors are on a GPU."""

    def __init__(self, file: FileIO, device: torch.device):
        self._file, self._alone = file, threading.Lock()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._of_thread = threading.local()

    def read(self, tensor: torch.Tensor, start: int) -> str:
        """Fill a tensor with the file's bytes from `start` on. Returns their checksum.

        Raises:
            ValueError: the file ends too early.
        """
        flat, checksum = tensor.reshape(-1).view(torch.uint8), xxhash.xxh3_128()
        for part in flat.split(PIECE):
            # summed up at once: the piece is still in the processor's cache
            checksum.update(self._on_cpu(part, start) if self._stream is None else self._on_gpu(part, start))
            start += len(part)
        return checksum.hexdigest()

    def _on_cpu(self, part: torch.Tensor, start: int) -> memoryview:
        content = _bytes(part)
        self._fill(content, start)
        return content

    def _on_gpu(self, part: torch.Tensor, start: int) -> memoryview:
        if not hasattr(self._of_thread, "buffers"):
            pinned = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
            self._of_thread.buffers = itertools.cycle([(buffer, torch.cuda.Event()) for buffer in pinned])
        buffer, copied = next(self._of_thread.buffers)
        copied.synchronize()  # of the piece before; an event that was never recorded is over
        content = _bytes(buffer[: len(part)])
        self._fill(content, start)
        with torch.cuda.stream(self._stream):
            part.copy_(buffer[: len(part)], non_blocking=True)
            copied.record(self._stream)
        return content

    def _fill(self, content: memoryview, start: int) -> None:
        done = 0
        while done < len(content):
            if not (count := self._read_at(content[done:], start + done)):
                raise ValueError(f"{self._file.name} is truncated")
            done += count

    def _read_at(self, content: memoryview, start: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [content], start)
        with self._alone:
            self._file.seek(start)
            return self._file.readinto(content)


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
