"""Caches of many tokens for decoding, ours and transformers'. Caches are filled directly with random keys and values,
because the numbers do not change a step's reads. Reading a prompt of 128k tokens would take most of a minute.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import typer
from transformers import CompileConfig, DynamicCache, QuantizedCache, StaticCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.eval.benchmarks.packed_layer import fill, random_parameters
from hf_lowbit_kv.eval.benchmarks.random_models import StepClock
from hf_lowbit_kv.generation.compiling import compile_config
from hf_lowbit_kv.presets import get_preset

#: number of tokens that a filled cache still has room for
HEADROOM = 512
#: modes whose steps are recorded
RECORDED = ("recorded", "unfused")


@dataclass(eq=False)
class Contender:
    """A cache and a way to decode with it.

    Args:
        name: `kivi-2` or another preset (`low_bit_cache`), `DynamicCache`, `StaticCache`, `quanto-4`.
        mode: one of those in `bench_generate.py`.
        cache: the cache; `set_back` fills it.
        length: tokens in the filled cache.
    """

    name: str
    mode: str
    model: Any
    cache: Any
    batch: int
    backend: str | None = None
    length: int = 0
    filled: int = 0
    kv_heads: int | None = None
    """KV heads of this process, if tensor parallelism splits those of the model"""
    source: list[torch.Tensor] = field(default_factory=list)
    """keys and values `[B, H, n, D]` that `set_back` writes: of all tokens (transformers' caches) or of the tail
    (ours)"""

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.name, self.backend, self.mode)))

    @property
    def ours(self) -> bool:
        return isinstance(self.cache, lb.LowBitCache)

    def compile(self) -> None:
        """Compile the step, with an empty cache."""
        self._attach()
        if self.mode != "eager":
            ids = torch.zeros(self.batch, 4, dtype=torch.long, device=self.model.device)
            self.generate(ids, 5)
            self.cache.reset()

    def fill(self, tokens: int) -> None:
        """Fill the cache with `tokens - 1` random tokens, so that the next token attends to `tokens`."""
        self.length, config, model = tokens - 1, self.model.config, self.model
        if self.ours:
            if self.length > self.filled:  # a cache filled before with a longer history serves shorter lengths too
                fill_low_bit(self.cache, model, self.batch, self.length, self.kv_heads)
                self.filled = self.length
                state = self.cache.packed_layers[0].store.state
                self.source = [state.tail_k.clone(), state.tail_v.clone()]
        else:
            heads = (self.batch, config.num_key_value_heads)
            self.source = [
                torch.randn(*heads, self.length, config.head_dim, dtype=model.dtype, device=model.device) for _ in "kv"
            ]
        self.set_back()

    def set_back(self) -> None:
        """Bring the cache back to its state after `fill`."""
        if self.ours:
            # a step may have packed the tail's oldest page, and later steps have overwritten the page in the tail
            for layer in self.cache.packed_layers:
                for window, source in zip(
                    (layer.store.state.tail_k, layer.store.state.tail_v), self.source, strict=True
                ):
                    window.copy_(source)
            set_length(self.cache, self.length)
            self.cache.text = None
        elif isinstance(self.cache, StaticCache):
            layers: Any = self.cache.layers
            for layer in layers:
                if not layer.is_initialized:
                    layer.lazy_initialization(*(x[:, :, :1] for x in self.source))
                layer.keys[:, :, : self.length].copy_(self.source[0])
                layer.values[:, :, : self.length].copy_(self.source[1])
                layer.cumulative_length.fill_(self.length)
        elif isinstance(self.cache, QuantizedCache):
            if not self.cache.get_seq_length():  # it cannot be cropped, so the tokens of a few steps stay
                for index in range(len(self.cache.layers)):
                    self.cache.update(self.source[0], self.source[1], index)
        else:
            self.cache = DynamicCache(config=self.model.config)
            for index in range(self.model.config.num_hidden_layers):
                self.cache.update(self.source[0], self.source[1], index)

    @property
    def transient(self) -> bool:
        """Whether `set_back` makes a new cache."""
        return type(self.cache) is DynamicCache

    def put_away(self) -> None:
        """Free the memory of the cache if `set_back` makes a new one."""
        if self.transient:
            self.cache = DynamicCache(config=self.model.config)

    def prompt(self) -> torch.Tensor:
        """Token ids `[B, length + 1]`: placeholders for the stored tokens, and the next token."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.model.config.vocab_size, (self.batch, 1), generator=generator)
        ids = ids.to(self.model.device)
        return torch.cat([ids.new_zeros(self.batch, int(self.cache.get_seq_length())), ids], dim=1)

    def generate(self, ids: torch.Tensor, new_tokens: int, **options: Any) -> Any:
        """Run `generate` with this cache: greedy, exactly `new_tokens` tokens."""
        self._attach()
        options = {"do_sample": False, "pad_token_id": 0, **options}
        eager = options.pop("disable_compile", self.mode == "eager") or self.mode == "eager"
        recorded = self.mode in RECORDED
        compiles = not eager and not recorded and self.model.device.type == "cuda"
        if self.mode == "tuned" and compiles:
            options["compile_config"] = compile_config()
        elif compiles:
            options["compile_config"] = CompileConfig()
        if self.ours and self.mode != "eager":
            step: Any = "eager" if eager else "recorded" if recorded else None
            call: Any = functools.partial(
                lb.generate, self.model, progress=False, step=step, fuse=self.mode != "unfused"
            )
        else:
            call = self.model.generate
            options["disable_compile"] = eager
        return call(
            inputs=ids,
            attention_mask=torch.ones_like(ids),
            **as_argument(self.cache),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            **options,
        )

    def steps_ms(self, steps: int) -> list[float]:
        """Milliseconds of each of `steps` steps."""
        self.set_back()
        clock = StepClock(self.model.device)
        self.generate(self.prompt(), steps + 3, logits_processor=[clock])
        return clock.steps_ms()

    def cache_bytes(self) -> int:
        """Bytes that a step must read: stored tokens, without unused capacity."""
        if self.ours:
            parts = self.cache.nbytes
            return parts.codes + parts.metadata + parts.window
        config = self.model.config
        full = 2 * self.batch * self.length * config.num_key_value_heads * config.head_dim * self.model.dtype.itemsize
        bits = re.fullmatch(r"quanto-(\d)", self.name)  # per group of 64: scale and shift in the model's dtype
        per_number = (int(bits[1]) + 2 * 16 / 64) / 16 if bits else 1
        return int(full * per_number) * config.num_hidden_layers

    def allocated_bytes(self) -> int:
        """Bytes of the cache, unused capacity included."""
        if self.ours:
            return int(self.cache.nbytes)
        if isinstance(self.cache, StaticCache):
            static: Any = self.cache.layers
            return sum(layer.keys.nbytes + layer.values.nbytes for layer in static)
        return self.cache_bytes()

    def _attach(self) -> None:
        wanted = lb.ATTENTION_NAME if self.ours else "sdpa"
        if self.model.config._attn_implementation != wanted:
            self.model.set_attn_implementation(wanted)


def make(name: str, mode: str, model: Any, batch: int, capacity: int, backend: str | None = None) -> Contender:
    """A contender by name. capacity: most tokens of a row, for caches of fixed size."""
    cache: Any
    if name == "DynamicCache":
        cache = DynamicCache(config=model.config)
    elif name == "StaticCache":
        cache = StaticCache(config=model.config, max_cache_len=capacity)
    elif (match := re.fullmatch(r"quanto-(\d)", name)) is not None:
        cache = QuantizedCache("quanto", config=model.config, nbits=int(match[1]))
    else:
        preallocated = {"max_cache_len": capacity} if mode != "eager" else {}
        cache = low_bit_cache(name, model, backend=backend, **preallocated)
    if mode in RECORDED and not isinstance(cache, lb.LowBitCache):
        raise ValueError(f"mode={mode!r} is not possible with {name}: only lb.generate records steps")
    if mode in ("compiled", "tuned") and not cache.is_compileable:
        raise ValueError(f"mode={mode!r} is not possible with {name}: the host compiles for preallocated caches")
    return Contender(name, mode, model, cache, batch, backend if isinstance(cache, lb.LowBitCache) else None)


def low_bit_cache(name: str, model_or_config: Any, **options: Any) -> lb.LowBitCache:
    """Our cache by name: a preset, with another window if the name has one, e.g. `eigen-2,sink=4,residual=32`. A preset
    that needs a calibration gets random parameters, because the model's weights are random too.

    Raises:
        ValueError: an unknown preset, or options other than sink and residual.
    """
    preset, *changes = name.split(",")
    window: dict[str, Any] = {}
    for change in changes:
        if (match := re.fullmatch(r"(sink|residual)=(\d+)", change)) is None:
            raise ValueError(
                f"cache={name!r}: {change!r} is not understood; allowed after a preset: sink=N, residual=N"
            )
        window[match[1]] = int(match[2])
    spec = get_preset(preset).spec()
    config = getattr(model_or_config, "config", model_or_config)
    if spec.parameters(64, 64, 1):
        device = getattr(model_or_config, "device", torch.device("cpu"))
        parameters = random_parameters(
            spec, (config.head_dim, config.head_dim), config.num_key_value_heads, None, device
        )
        options["parameters"] = dict.fromkeys(range(config.num_hidden_layers), parameters)
    return lb.from_preset(preset, model_or_config, **window, **options)


def fill_low_bit(cache: lb.LowBitCache, model: Any, batch: int, tokens: int, kv_heads: int | None = None) -> None:
    """Fill every row with `tokens` random tokens, the same in every layer. kv_heads: KV heads of this process [default:
    all]."""
    config = model.config
    heads = config.num_key_value_heads if kv_heads is None else kv_heads
    empty = torch.zeros(batch, heads, 1, config.head_dim, dtype=model.dtype, device=model.device)
    first: Any = None
    layers: list[Any] = cache.packed_layers
    for layer in layers:
        if not layer.is_initialized:
            layer.lazy_initialization(empty, empty)
        layer.store.reserve(tokens)
        if first is None:
            first = layer.store
            fill(first, tokens)
            continue
        state, other = layer.store.state, first.state
        for target, source in zip([*state.pool, *state[3:]], [*other.pool, *other[3:]], strict=True):
            if isinstance(target, torch.Tensor):  # parameters are a list, and are never written
                target.copy_(source)
    set_length(cache, tokens)


def set_length(cache: lb.LowBitCache, tokens: int) -> None:
    """Set the counters of a filled cache to `tokens`, at most the number of tokens that it has stored."""
    layers: list[Any] = cache.packed_layers
    for layer in layers:
        state, spec = layer.store.state, layer.store.spec
        state.length.fill_(tokens)
        state.paged.fill_(spec.paged_after(tokens - spec.sink))
        layer._forget()
        layer.facts.mode = "packed"
        layer.length.set(tokens)


def near_tie(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether the two likeliest tokens of logits `[..., vocabulary]` are close: no further apart than six times the typical
    (root mean square) difference of a logit from `other`. bool `[...]`."""
    first, second = exact.float().topk(2, dim=-1).values.unbind(-1)
    return first - second <= 6 * (other - exact).float().square().mean(-1).sqrt()


# ---- names ------------------------------------------------------------------------------------------------------------


def is_host(name: str) -> bool:
    """Whether a cache is one of transformers'."""
    return name.endswith("Cache") or name.startswith("quanto")


class Wanted(NamedTuple):
    """A contender as named on the command line."""

    name: str
    backend: str | None
    mode: str
    longest: int | None

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """Parse `NAME[:BACKEND]/MODE[@TOKENS]`. The contender is timed at lengths up to TOKENS."""
        match = re.fullmatch(r"([^:/@]+)(?::(\w+))?/(eager|recorded|unfused|compiled|tuned)(?:@(\d+))?", text)
        if match is None:
            raise ValueError(
                f"contender={text!r} is not understood; allowed: NAME[:BACKEND]/MODE[@TOKENS], MODE eager, recorded, "
                "unfused, compiled or tuned"
            )
        return cls(match[1], match[2], match[3], int(match[4]) if match[4] else None)

    @property
    def is_host(self) -> bool:
        return is_host(self.name)

    def at(self, length: int) -> bool:
        return self.longest is None or length <= self.longest


class BatchSize(NamedTuple):
    """Number of rows, and of tokens that each row attends to."""

    batch: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> BatchSize:
        """Parse `ROWSxTOKENS`. Raises `typer.BadParameter` for anything else."""
        batch, _, tokens = text.partition("x")
        if not (batch.isdecimal() and tokens.isdecimal() and int(batch) and int(tokens) > 1):
            raise typer.BadParameter(f"size={text!r} is not understood; allowed: ROWSxTOKENS, e.g. 8x32768")
        return cls(int(batch), int(tokens))
