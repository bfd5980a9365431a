"""Runs the examples of a page in their order: Python blocks in one namespace, shell blocks as commands of this process."""

import contextlib
import importlib
import importlib.util
import json
import os
import queue
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import typer
from packaging.requirements import Requirement
from sybil import Document, Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from sybil.region import Lexeme
from tiny_hub import BUNDLED, TinyHub

from hf_lowbit_kv import cli, formats, presets
from hf_lowbit_kv.cli import application
from hf_lowbit_kv.eval.local_models import MissingPackageError
from hf_lowbit_kv.installation import DATA

ROOT = Path(__file__).resolve().parents[2]
#: files that commands read, filled with an essay where an example did not write them
TEXTS = {"book.txt", "notes.txt", "code.txt", "code.py"}
#: options that commands get where examples leave their defaults: less to read and to write
SHORTER = [(["eval", "perplexity"], "--context", "1024"), (["demo"], "--max-new-tokens", "8")]
#: tokens that Python blocks ask for, at most
NEW_TOKENS = 24
#: what a comment in front of a block says of it
MARK = re.compile(r"<!-- (gpu|file(?: only)?: [\w.-]+) -->\s*```\w+\n\Z")


def pages() -> list[str]:
    """README and the pages with blocks that are run."""
    found = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "dev").glob("*.md")]
    return sorted(
        str(page.relative_to(ROOT)) for page in found if re.search(r"^```(python|sh)\n", page.read_text(), re.MULTILINE)
    )


def _at_most(number: re.Match) -> str:
    return str(min(int(number[0]), NEW_TOKENS))


def shell_lines(source: str) -> list[list[str]]:
    """The words of each command of a shell block."""
    lines = source.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


class Page:
    """A page whose blocks run.

    Args:
        name: relative to the checkout. hub: a fake of the model hub. folder: the working directory, with what examples write.
        device: of the model that is at hand; blocks that need a GPU run only on `cuda`.
    """

    def __init__(self, name: str, hub: TinyHub, folder: Path, namespace: dict[str, Any], device: str):
        self.folder, self.device, self.ran = folder, device, 0
        self.gpu, self.server = device == "cuda", Server()
        parsers = [PythonCodeBlockParser(), CodeBlockParser(language="sh", evaluator=self._shell)]
        self.document: Document = Sybil(parsers, path=str(ROOT)).parse(ROOT / name)
        self.document.namespace.update(namespace)
        self.outside = Registry()
        hub.link(self.document.text, folder)

    def run(self) -> None:
        """All blocks, top to bottom. What they register is gone afterwards."""
        try:
            for example in self.document.examples():
                mark = MARK.search(self.document.text[: self._body(example)])
                if mark and mark[1] == "gpu" and not self.gpu:
                    continue
                shorter = re.sub(r"(?<=max_new_tokens=)\d+", _at_most, example.parsed)
                example.parsed = Lexeme(shorter, example.parsed.offset, example.parsed.line_offset)
                if mark and mark[1].startswith("file"):
                    kind, _, name = mark[1].partition(": ")
                    (self.folder / name).write_text(example.parsed, encoding="utf-8")
                    if kind == "file only":  # a command runs it
                        continue
                example.evaluate()
                self.ran += 1
        finally:
            self.server.stop()
            self.outside.restore()

    def _body(self, example: Example) -> int:
        """Where the text of a block begins."""
        return self.document.text.index("\n", example.start) + 1

    def _shell(self, example: Example) -> None:
        for words in shell_lines(example.parsed):
            inside = Registry()
            self.outside.restore()  # a command is a process of its own
            try:
                self._command(words)
            finally:
                inside.restore()

    def _command(self, words: list[str]) -> None:
        match words:
            case [variable, *command, "&"] if variable.startswith("CUDA_VISIBLE_DEVICES="):
                self._command(command)
            case ["caddy", "run", "--config", _]:
                pass  # a test of the server runs it with the page's text
            case ["hf-lowbit-kv", *arguments]:
                self._own(arguments)
            case ["pip", "install", *arguments]:
                check_install(arguments)
            case ["make", *targets]:
                makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
                assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), targets
            case ["accelerate", "launch", "--multi_gpu", *options]:  # here in one process
                self._own(options[options.index("hf_lowbit_kv") + 1 :])
            case ["ray", "start", *_] | ["python", "answer.py", *_] | ["torchrun", *_, "run.py"]:
                pass  # tests of their own start several processes with the page's lines
            case ["python", "-m", "hf_lowbit_kv.eval.lm_eval_model", *arguments]:
                self._lm_eval(arguments)
            case [
                "torchrun",
                "--nproc-per-node",
                _,
                "-m",
                module,
                *arguments,
            ]:  # a benchmark on several GPUs: its options
                source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
                assert all(
                    each.removeprefix("--").replace("-", "_") in source for each in arguments if each[:2] == "--"
                )
            case ["TRITON_INTERPRET=1", "python", file]:
                self._interpreted(file)
            case ["python", "-m", module, *arguments]:
                run_main(module, arguments)
            case _:
                raise AssertionError(f"no way to run {shlex.join(words)!r}")

    def _interpreted(self, file: str) -> None:
        """A script of the page in Triton's interpreter, where the machine has Triton."""
        if importlib.util.find_spec("triton") is None:
            return
        sign = self.folder / "sign.py"  # as the page says: the kernels are named where the class is registered
        source = sign.read_text(encoding="utf-8").replace(
            "@lb.register_format\n", "@lb.register_format(triton=sign_kernels)\n"
        )
        sign.write_text(f"import sign_kernels\n{source}", encoding="utf-8")
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run([sys.executable, file], cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("bytes are equal") == 2, done.stdout

    def _own(self, arguments: list[str]) -> None:
        """Our command, with a tiny model in place of the bundled one."""
        command, path = find_command(arguments)
        for word in TEXTS.intersection(arguments):
            write_text(self.folder / word)
        options = list(arguments)
        takes_model = any("--model" in each.opts for each in command.params)
        if "--dataset" in options and "wikitext" in options:
            write_dataset(self.folder / "wikitext", options[options.index("--config") + 1])
        if path == ["eval", "protocol"]:
            options += small_protocol(self.folder, options[options.index("--name") + 1])
        if path == ["serve"]:
            self.server.start(options if "--device" in options else [*options, "--device", self.device])
            return
        if takes_model and "--model" not in options and path != ["fits"]:
            options += ["--model", BUNDLED]
        for command_path, option, value in SHORTER:
            if path == command_path and option not in options:
                options += [option, value]
        if path == ["eval", "lm-eval"]:
            options = on_offline_tasks(options)
        with own_exit():
            cli.main(options)

    def _lm_eval(self, arguments: list[str]) -> None:
        pytest.importorskip("lm_eval.models.huggingface")
        from hf_lowbit_kv.eval import lm_eval_model

        with own_exit(), arguments_of_process([*arguments, "--limit", "2"]):
            lm_eval_model.main()


class Server:
    """`hf-lowbit-kv serve` in a thread, at the address that it is given, until the page ends. The `openai` client of the
    page reaches it without a network."""

    def __init__(self) -> None:
        self.patch, self.ended, self.thread = pytest.MonkeyPatch(), threading.Event(), None

    def start(self, options: list[str]) -> None:
        import openai
        import uvicorn
        from starlette.testclient import TestClient

        from hf_lowbit_kv.requests.server import openai_server

        ready = queue.SimpleQueue()

        def run(server: Any, sockets: Any) -> None:
            ready.put(server.config.app)
            self.ended.wait()

        def command() -> None:
            try:
                cli.main(options)
            except BaseException as error:
                ready.put(error)

        self.patch.setattr(uvicorn.Server, "run", run)
        self.patch.setattr(openai_server, "bind", lambda *_: [])  # no port is opened
        self.thread = threading.Thread(target=command, daemon=True)
        self.thread.start()
        app = ready.get(timeout=60)
        if isinstance(app, BaseException):
            raise app
        original = openai.OpenAI
        self.patch.setattr(openai, "OpenAI", lambda **options: original(**options, http_client=TestClient(app)))

    def stop(self) -> None:
        self.ended.set()
        if self.thread is not None:
            self.thread.join(60)
        self.patch.undo()


def find_command(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """The command that arguments begin with, and its name in words."""
    command: Any = typer.main.get_command(application.app)
    path = list[str]()
    while hasattr(command, "commands"):
        path.append(arguments[len(path)])
        command = command.commands[path[-1]]
    return command, path


def on_offline_tasks(options: list[str]) -> list[str]:
    """Options of `eval lm-eval` with two items of an offline task in place of tasks of the hub."""
    words = list(options)
    at = words.index("--tasks") + 1
    words[at] = words[at] if words[at] in ("hellaswag_100", "mmlu_sample", "needle") else "needle"
    if "--limit" in words:
        words[words.index("--limit") + 1] = "2"
        return words
    return [*words, "--limit", "2"]


def small_protocol(folder: Path, name: str) -> list[str]:
    """Options that let a protocol run on local data, little of it."""
    if name == "wikitext":
        write_dataset(folder / "wikitext", "wikitext-2-raw-v1")
        return ["--dataset", str(folder / "wikitext" / "test.jsonl"), "--windows", "1"]
    data = folder / "papers"
    (data / "gsm8k").mkdir(parents=True, exist_ok=True)
    row = {"question": "How many tokens has a page? " * 40, "answer": "A page has 128. #### 128"}
    for split in ("train", "test"):
        (data / "gsm8k" / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 9)
    return ["--dataset", str(data), "--tasks", "gsm8k", "--limit", "2", "--gen_kwargs", "max_gen_toks=4"]


def check_install(arguments: list[str]) -> None:
    """Raise where `pip install` names an extra that is not there, or another version than the project installs."""
    project, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "Makefile"))
    for word in arguments:
        if word.startswith("-"):
            continue
        own = re.fullmatch(r"(?:\.|hf-lowbit-kv)(?:\[([\w,]+)\])?", word)
        if own:
            assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in (own[1] or "dev").split(",")), (
                word
            )
        elif (wanted := Requirement(word)).specifier:
            assert str(wanted) in [*DATA.values()] or str(wanted) in project + makefile, (
                f"{word} is not what the project installs"
            )


def run_main(module: str, arguments: list[str]) -> None:
    """`python -m module`, in this process."""
    with own_exit(), arguments_of_process(arguments):
        importlib.import_module(module).main()


@contextlib.contextmanager
def arguments_of_process(arguments: list[str]):
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def own_exit():
    """A command that exits with anything but 0 has failed."""
    try:
        yield
    except SystemExit as stop:
        # machines with a GPU may lack the bundled model and texts, which `make` installs
        if isinstance(missing := stop.__context__ or stop.__cause__, MissingPackageError) and torch.cuda.is_available():
            pytest.skip(str(missing))
        if stop.code:
            raise AssertionError(f"exit code {stop.code}") from stop


def write_text(path: Path) -> None:
    """Essays that accuracy is not measured on, where there is no file yet."""
    if not path.exists():
        from hf_lowbit_kv.eval.local_models import calibration_texts

        essays = [each.read_text(encoding="utf-8") for each in calibration_texts()[:12]]
        path.write_text("\n\n".join(essays), encoding="utf-8")


def write_dataset(folder: Path, config: str) -> None:
    """A folder that `datasets` loads as it would load the hub's data set of that name."""
    folder.mkdir(exist_ok=True)
    write_text(folder / "essays.txt")
    rows = [{"text": part} for part in (folder / "essays.txt").read_text(encoding="utf-8").split("\n\n")]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n  - split: test\n    path: test.jsonl\n---\n"
    )


class Registry:
    """Formats and presets as they are now."""

    def __init__(self) -> None:
        self.formats = list(formats.FORMATS)
        self.presets = [(each, dict(each)) for each in (presets.PRESETS, presets._PLAIN)]
        self.imported = dict(_imported())

    def restore(self) -> None:
        formats.FORMATS[:] = self.formats
        for now, kept in self.presets:
            now.clear()
            now.update(kept)
        _imported().clear()
        _imported().update(self.imported)
        formats.forget_names()


def _imported() -> dict[Path, str]:
    from hf_lowbit_kv.cli import every_command

    return every_command._imported
