"""Lines of docs/several-machines.md that start processes on two machines, with this machine in place of both."""

import os
import re
import subprocess
import sys
from pathlib import Path

from page_examples import ROOT, shell_lines
from processes import free_port

PAGE = (ROOT / "docs" / "several-machines.md").read_text(encoding="utf-8")
#: launchers, and the modules that they run
LAUNCHERS = {"accelerate": "accelerate.commands.launch", "torchrun": "torch.distributed.run"}
#: options of launchers, and what they are here: one process on each machine
HERE = {
    "--num_processes": "2",
    "--nproc-per-node": "1",
    "--main_process_ip": "127.0.0.1",
    "--master-addr": "127.0.0.1",
}
PORTS, RANKS = ("--main_process_port", "--master-port"), ("--machine_rank", "--node-rank")


def commands(last: str) -> list[list[str]]:
    """For each of two machines, the page's line that a launcher begins and that has the word `last`, up to this word."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = [words for block in blocks for words in shell_lines(block)]
    (line,) = [words for words in lines if words[0] in LAUNCHERS and last in words]
    options = line[2 if line[0] == "accelerate" else 1 : line.index(last) + 1]
    here = HERE | dict.fromkeys(PORTS, str(free_port()))
    return [
        [sys.executable, "-m", LAUNCHERS[line[0]], *_replaced(options, here | dict.fromkeys(RANKS, str(rank)))]
        for rank in range(2)
    ]


def _replaced(options: list[str], values: dict[str, str]) -> list[str]:
    return [values.get(before, word) for before, word in zip(["", *options], options)]


def run_at_once(commands: list[list[str]], folder: Path, **environment: str) -> list[subprocess.CompletedProcess[str]]:
    """Run commands at the same time, and wait until all have ended.

    Raises:
        subprocess.TimeoutExpired: one has not ended within 300 seconds. All are killed then.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [subprocess.Popen(each, text=True, cwd=folder, env=environment, **pipes) for each in commands]
    try:
        output = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *texts)
        for process, texts in zip(started, output, strict=True)
    ]
