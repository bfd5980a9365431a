"""The CUDA kernels on the CPU: their sources, with what is not C++ replaced, compiled by g++ (what this shows: `machine.h`)."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from hf_lowbit_kv.triton_kernels.cuda.nvrtc import source

HERE = Path(__file__).parent
FOLDER = Path(tempfile.gettempdir()) / "hf-lowbit-kv-emulated"
OPTIONS = ("-std=c++17", "-O2", "-mf16c", "-ffp-contract=off", "-w", "-fPIC", "-g1")
#: every use of memory is a call (into races.h)
WATCHED = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-fno-threadsafe-statics")
#: kernel -> its argument
ARGUMENTS = {"attend": "StepArgs", "transform": "TransformArgs", "project": "ProjectArgs"} | dict.fromkeys(
    (
        *("latent_attend", "latent_wide_attend", "latent_dense_attend", "latent_merge", "latent_merge_rows"),
        *("latent_append", "latent_counters"),
    ),
    "LatentArgs",
)
#: number -> a kernel of the file that holds it
NUMBERS = {
    "shared_bytes": "attend",
    "argument_bytes": "attend",
    "latent_shared_bytes": "latent_attend",
    "latent_wide_shared_bytes": "latent_wide_attend",
    "latent_dense_shared_bytes": "latent_dense_attend",
}


def available() -> bool:
    """Whether this machine can: g++ and a processor of the x86 family."""
    if (compiler := shutil.which("g++")) is None:
        return False
    return "x86_64" in subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True).stdout


def translate(name: str) -> str:
    text = source(name)
    start, end = text.index("__device__ __forceinline__ void cp16("), text.index("// Sum over the eight lanes")
    text = text[:start] + (HERE / "ptx.h").read_text() + text[end:]
    if "// begin of hopper" in text:
        start, end = text.index("// begin of hopper"), text.index("// end of hopper")
        text = text[:start] + (HERE / "hopper.h").read_text() + text[end:]
    replaced = (
        (r'asm volatile\("ld\.shared\.u16 %0, \[%1\];" : "=h"\((\w+)\) : "r"\((.*?)\)\);', r"\1 = lds_u16(\2);"),
        (r"__device__ __forceinline__ u16 half_bits\(.*\n", ""),
        (r'asm volatile\("bar\.sync.*"r"\((.*?)\), "n"\((.*?)\) : "memory"\);', r"barriers[\1].wait(\2);"),
        (r"extern __shared__ __align__\(\d+\) u8 (\w+)\[\];", r"u8* \1 = shared_memory;"),
    )
    for pattern, new in replaced:
        text = re.sub(pattern, new, text)
    assert not re.search(r"\basm\b", text), re.findall(r".*\basm\b.*", text)
    return text


class Module:
    """In place of `compile.Module`. without: a pattern of what is left out of the source, to see what that does."""

    def __init__(self, name: str, defines: tuple[tuple[str, str], ...], without: str | None = None):
        macros = "".join(f"#define {macro} {value}\n" for macro, value in defines)
        text = translate(name) if without is None else re.sub(without, ";", translate(name))
        self.text = f'{macros}#include "{HERE / "machine.h"}"\n{text}\n'
        self.libraries: dict[str, ctypes.CDLL] = {}
        self.launched = 0

    def _library(self, call: str) -> ctypes.CDLL:
        if call not in self.libraries:
            entry = f"static void entry() {{ {call}; check_waited(); finished[current] = true; for (;;) yield(); }}\n"
            text = (
                f"{self.text}static const void* argument;\n{entry}"
                'extern "C" int run(const void* a, int x, int y, int z, int n, int backwards) '
                "{ argument = a; return run_grid(entry, x, y, z, n, backwards); }\n"
            )
            FOLDER.mkdir(exist_ok=True)
            headers = "".join(
                (HERE / name).read_text() for name in ("machine.h", "races.h")
            )  # the others are in the text
            key = hashlib.sha256((text + headers + repr((OPTIONS, WATCHED))).encode()).hexdigest()[:24]
            path = FOLDER / f"{key}.so"
            if not path.exists():
                with (
                    tempfile.NamedTemporaryFile("w", suffix=".cpp") as file,
                    tempfile.TemporaryDirectory(dir=FOLDER) as work,
                ):
                    file.write(text)
                    file.flush()
                    built = Path(work) / path.name
                    # in two steps: linked without the sanitizer's own library
                    part = str(Path(work) / "part.o")
                    subprocess.run(["g++", *OPTIONS, *WATCHED, "-c", "-o", part, file.name], check=True)
                    subprocess.run(["g++", "-shared", "-o", str(built), part], check=True)
                    built.replace(path)
            self.libraries[call] = ctypes.CDLL(str(path))
        return self.libraries[call]

    def integer(self, name: str) -> int:
        kernel = NUMBERS[name]
        return ctypes.c_int.in_dll(self._library(f"{kernel}(*(const {ARGUMENTS[kernel]}*)argument)"), name).value

    def launch(self, name: str, grid: tuple[int, int, int], threads: int, *args, shared: int = 0) -> None:
        more = "".join(f", {arg.value}" for arg in args[1:])
        library = self._library(f"{name}(*(const {ARGUMENTS.get(name, 'AppendArgs')}*)argument{more})")
        # blocks run one after the other, every other time from the last to the first: their order must not matter
        self.launched += 1
        done = library.run(ctypes.byref(args[0]), *grid, threads, self.launched % 2)
        assert done != 1, "threads wait for each other"
        assert done == 0, f"races in shared memory were printed; where: addr2line -ie {library._name}"
