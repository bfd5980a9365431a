"""The CUDA kernels on the CPU: their sources, with other files for the two that hold assembly, compiled by g++.

`machine.h` says what this shows. A source file and its macros make one library, with all kernels of the file. Libraries are
kept in a folder among the system's temporary ones, under a name that says what they were made from, so that test processes
and later runs share them. Most of what g++ reads are the system's headers: they are compiled beforehand, once.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hf_lowbit_kv.triton_kernels.cuda.nvrtc import SOURCES, headers_in, joined

HERE = Path(__file__).parent
FOLDER = Path(tempfile.gettempdir()) / f"hf-lowbit-kv-emulated-{os.getuid() if hasattr(os, 'getuid') else 0}"
#: -Og: further levels take the compiler longer than they save kernels of a few hundred blocks
OPTIONS = ("-std=c++17", "-Og", "-mf16c", "-ffp-contract=off", "-w", "-fPIC", "-g1")
#: every use of memory is a call (into races.h)
WATCHED = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-fno-threadsafe-statics")
#: file of the kernels -> its replacement
STAND_INS = {"ptx.cuh": "ptx.h", "hopper_ptx.cuh": "hopper.h"}
#: a kernel's definition: its name and its parameters
KERNEL = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s+)?(\w+)\(([^()]*)\) \{'
)


def available() -> bool:
    """Whether this machine can: g++ and a processor of the x86 family."""
    if (compiler := shutil.which("g++")) is None:
        return False
    return "x86_64" in subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True).stdout


@functools.cache
def translated(name: str, headers: tuple[tuple[str, str], ...]) -> str:
    """The text of a source file with all that it includes, for g++. headers: see `nvrtc.joined`."""

    def read(name: str) -> str:
        path = HERE / STAND_INS[name] if name in STAND_INS else SOURCES / name
        return path.read_text(encoding="utf-8")

    text = joined(name, read, dict(headers))
    assert not re.search(r"\basm\b", text), re.findall(r".*\basm\b.*", text)
    # where a kernel is defined, it gets a function that launches it: some are defined only for some macros
    return KERNEL.sub(r'extern "C" void \1(\2); LAUNCHED(\1) \g<0>', text)


def full_text(name: str, defines: tuple[tuple[str, str], ...]) -> str:
    """What g++ gets."""
    macros = "".join(f"#define {macro} {value}\n" for macro, value in defines)
    return f'#include "machine.h"\n{macros}{translated(name, headers_in(defines))}\n'


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Other processes that want to make the same file wait until it is there."""
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(*parts: object) -> str:
    return hashlib.sha256(repr((parts, OPTIONS, WATCHED)).encode()).hexdigest()[:24]


@functools.cache
def _headers() -> Path:
    """The folder with `machine.h` and what g++ has made of it."""
    texts = [(HERE / name).read_text(encoding="utf-8") for name in ("machine.h", "races.h")]
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout
    folder = FOLDER / _key(texts, compiler)
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "machine.h.gch"
    with _alone(made):
        if not made.exists():
            for name, text in zip(("machine.h", "races.h"), texts):
                (folder / name).write_text(text, encoding="utf-8")
            part = made.with_suffix(".part")
            command = ["g++", *OPTIONS, *WATCHED, "-x", "c++-header", "-o", str(part), str(folder / "machine.h")]
            subprocess.run(command, check=True)
            part.replace(made)
    return folder


def _library(text: str) -> Path:
    headers = _headers()
    path = headers / f"{_key(text)}.so"
    with _alone(path):
        if not path.exists():
            source, part, linked = (path.with_suffix(suffix) for suffix in (".cpp", ".o", ".part"))
            source.write_text(text, encoding="utf-8")
            # in two steps: linked without the sanitizer's own library
            options = [*OPTIONS, *WATCHED, "-I", str(headers)]
            subprocess.run(["g++", *options, "-c", "-o", str(part), str(source)], check=True)
            subprocess.run(["g++", "-shared", "-o", str(linked), str(part)], check=True)
            part.unlink()
            linked.replace(path)
    return path


def complaints(text: str) -> str:
    """What g++ has to say against a text, which it does not compile: nothing where all assertions hold."""
    command = ["g++", *OPTIONS, *WATCHED, "-I", str(_headers()), "-fsyntax-only", "-xc++", "-"]
    return subprocess.run(command, input=text, text=True, capture_output=True).stderr


class Module:
    """In place of `nvrtc.Module`. without: name of a `BARRIER` in the source that launches leave out, to see what that does."""

    def __init__(self, name: str, defines: tuple[tuple[str, str], ...], without: str | None = None):
        self.text = full_text(name, defines)
        assert without is None or f"BARRIER({without}, " in self.text, f"{name} has no barrier of the name {without!r}"
        self.without = without or ""
        self.launched = 0

    @functools.cached_property
    def library(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(_library(self.text)))

    def integer(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def launch(self, name: str, grid: tuple[int, int, int], threads: int, *args, shared: int = 0, early=False) -> None:
        """args: the kernel's arguments, a structure first, then integers."""
        more = (ctypes.c_longlong * max(len(args) - 1, 1))(*(arg.value for arg in args[1:]))
        # blocks run one after the other, every other time from the last to the first: their order must not matter
        self.launched += 1
        (ctypes.c_char * 64).in_dll(
            self.library, "left_out"
        ).value = self.without.encode()  # others have this library, too
        run = getattr(self.library, f"run_{name}")
        done = run(ctypes.byref(args[0]), more, (ctypes.c_int * 3)(*grid), threads, self.launched % 2)
        assert done != 1, "threads wait for each other"
        assert done == 0, f"races in shared memory were printed; where: addr2line -ie {self.library._name}"
