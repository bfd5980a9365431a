"""What the wide latent kernel executes, read from its machine code: `python -m hf_lowbit_kv.eval.mla_instructions`.

NVRTC compiles `latent_wide.cu` for sm_90a; `cuobjdump` and `nvdisasm` read the result. No GPU is needed. The columns:

- `rows`: query rows of a block of threads. `registers`, `stack`: of a thread; bytes of stack are registers that did not fit.
- `usual`: instructions that a warp executes for 128 tokens where no reference moves. Of these, `scores` stand before the wait
  for products of scores, and `weights` behind it, up to the first product with values.
- `renewal`: instructions more where references move.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.table import Table

from hf_lowbit_kv.backends import storage_spec
from hf_lowbit_kv.eval.results import run_command, wide_console
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.triton_kernels.cuda import compile as compiling
from hf_lowbit_kv.triton_kernels.cuda import latent

RANK, ROPE = 512, 64
console = wide_console()


class Instruction(NamedTuple):
    name: str
    guard: str
    """the predicate under which it is executed, or nothing"""
    target: int | None
    """of a branch: the place where it goes on"""


def tool(name: str) -> str:
    """Where a program of the CUDA toolkit is.

    Raises:
        FileNotFoundError: not on the path, and not in a wheel.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else spec.submodule_search_locations or []
    wheels = (str(path) for folder in folders for path in Path(folder).glob(f"*/bin/{name}"))
    if (found := shutil.which(name) or next(wheels, None)) is None:
        raise FileNotFoundError(f"{name} is not installed: it comes with the CUDA toolkit, or as nvidia-cuda-{name}")
    return found


def machine_code(text: str) -> list[Instruction]:
    """What `nvdisasm -c` printed of one kernel, in order."""
    places: dict[str, int] = {}
    lines: list[tuple[str, str, str | None]] = []
    for line in text.splitlines():
        if found := re.match(r"(\.L_x_\d+):", line):
            places[found[1]] = len(lines)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\d+) )?\s*([A-Z0-9_]+)(.*);", line):
            goal = re.search(r"`\((\.L_x_\d+)\)", found[3]) if found[2] == "BRA" else None
            lines.append((found[2], found[1] or "", goal[1] if goal else None))
    return [Instruction(name, guard, places.get(goal) if goal else None) for name, guard, goal in lines]


def main_loop(code: list[Instruction]) -> tuple[int, int]:
    """First and last instruction of the loop over blocks: the shortest one that has all products. (Behind it stand the loops
    that wait for a barrier, and jump back into it.)"""
    products = [i for i, x in enumerate(code) if x.name == "QGMMA"]
    ends = (i for i, x in enumerate(code) if i > products[-1] and x.target is not None and x.target <= products[0])
    last = min(ends)
    first = code[last].target
    assert first is not None
    return first, last


def usual_path(code: list[Instruction], first: int, last: int) -> tuple[list[int], int]:
    """Places of what a warp executes in a round where no reference moves and it begins no copies; and how many instructions
    of the loop belong to a renewal of references."""

    def has(name: str, start: int, stop: int) -> bool:
        return any(x.name == name for x in code[start:stop])

    path, at, renewal = [], first, 0
    while at <= last:
        path.append(at)
        goal = code[at].target
        ahead = goal is not None and at < goal <= last + 1
        copies, renews = (ahead and has(name, at, goal or at) for name in ("UBLKCP", "ATOMS"))
        renewal += goal - at - 1 if goal is not None and renews else 0
        at = goal if goal is not None and ahead and (copies or renews or not code[at].guard) else at + 1
    return path, renewal


def compiled(columns: int, dtype: torch.dtype) -> bytes:
    spec = storage_spec(get_preset("snapmla").spec(), "cuda")
    stages, blocks = latent.WIDE_SHAPES[columns]
    stages = latent.wide_stages(RANK, ROPE, columns, stages)
    more = ("COLUMNS", str(columns)), ("STAGES", str(stages)), ("BLOCKS", str(blocks))
    return compiling.binary("latent_wide.cu", (*latent.defines(spec, RANK, ROPE, dtype, True), *more), "sm_90a")


def row(columns: int, dtype: torch.dtype) -> list[str]:
    """A row of the table."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(columns, dtype))
        file.flush()
        asked = [tool("nvdisasm"), "-c", file.name], [tool("cuobjdump"), "-res-usage", file.name]
        listing, usage = (subprocess.run(x, capture_output=True, text=True, check=True).stdout for x in asked)
    code = machine_code(listing)
    path, renewal = usual_path(code, *main_loop(code))
    names = [code[i].name for i in path]
    waited = next(i for i, x in enumerate(names) if x == "WARPGROUP" and i > names.index("QGMMA"))
    values = next(i for i, x in enumerate(names) if x == "QGMMA" and i > waited)
    used = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert used is not None
    return [str(x) for x in (columns, used[1], used[2], len(path), waited, values - waited, renewal)]


def main(
    sources: Annotated[
        Path | None, typer.Option(help="folder of other sources to read, e.g. of an older version")
    ] = None,
) -> None:
    """Print the table."""
    if sources is not None:
        compiling.SOURCES = sources
    table = Table("rows", "registers", "stack", "usual", "scores", "weights", "renewal")
    for columns in latent.WIDE_SHAPES:
        table.add_row(*row(columns, torch.bfloat16))
    console.print(table)


if __name__ == "__main__":
    run_command(main)
