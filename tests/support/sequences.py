"""Runs a sequence of operations on a cache, and compares everything with `sequence_truth`."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from types import SimpleNamespace

import mla_cases
import pytest
import torch
from sequence_operations import KINDS, MOST_ROWS, MOST_TOKENS, Setting
from sequence_truth import Step, Storage, TrueRow, attend
from transformers import AutoConfig

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.cache.attention_function import lowbit_attention, lowbit_mask
from hf_lowbit_kv.cache.low_bit_layer import LowBitLayer
from hf_lowbit_kv.storage.paged_store import read_pages
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.storage.transforms import parse_transform

HEAD_DIM = 64
LATENT_HEADS = 4
#: kinds that only the reference serves, on a GPU too
WITHOUT_KERNELS = ("latent fp8-block/dense", "latent fp8-static/fp8")
#: of fewer outputs of a query, errors are not compared only by their size
FEW_QUERIES = 32
#: share of the output: half a rounding of the model's dtype, and in float32, where sums differ in their order, this
LEAST_ERROR = 1e-5


@functools.cache
def _mla_model(dtype: torch.dtype):
    return mla_cases.tiny_models("deepseek_v3", dtype, num_hidden_layers=1, **mla_cases.DENSE_MLP)[0]


@functools.cache
def _config(layers: int, kv_heads: int, groups: int):
    sizes = {"num_attention_heads": kv_heads * groups, "num_key_value_heads": kv_heads, "head_dim": HEAD_DIM}
    return AutoConfig.for_model("llama", num_hidden_layers=layers, hidden_size=192, vocab_size=8, **sizes)


@functools.cache
def _parameters(kind: str, layers: int, kv_heads: int) -> dict[int, dict[str, torch.Tensor]]:
    """Random tensors for what a kind asks for, others in each layer and KV head."""
    gen, found = torch.Generator().manual_seed(7), {}
    names = KINDS[kind]
    spec = lb.LayerSpec(
        lb.parse_format(names["key_format"]),
        lb.parse_format(names["value_format"]),
        key_transform=parse_transform(names.get("transform")),
        value_transform=parse_transform(names.get("value_transform")),
    )
    for layer in range(layers):
        for name, shape, dtype in spec.parameters(HEAD_DIM, HEAD_DIM, kv_heads):
            x = torch.randn(shape, generator=gen)
            if name.endswith("matrix"):
                x = torch.linalg.qr(x)[0] + 0.1 * torch.eye(shape[-1])
            elif not name.endswith(("codebook", "center")):
                x = x.abs() + 0.5
            found.setdefault(layer, {})[name] = x.to(dtype)
    return found


class Text:
    """A cache, and what it must hold."""

    def __init__(self, cache: lb.LowBitCache):
        self.cache = cache
        self.layers: list[list[TrueRow]] = []
        self.mask = torch.zeros(0, 0, dtype=torch.bool)
        self.dense = False

    def twin(self, cache: lb.LowBitCache) -> Text:
        new = Text(cache)
        new.layers = [[copy.copy(row) for row in rows] for rows in self.layers]
        new.mask, new.dense = self.mask, self.dense
        return new

    @property
    def seen(self) -> int:
        return self.mask.shape[1]

    @property
    def rows(self) -> int:
        return self.mask.shape[0]

    def select(self, rows: list[int]) -> None:
        self.layers = [[copy.copy(layer[row]) for row in rows] for layer in self.layers]
        self.mask = self.mask[rows]


class Machine:
    """Runs one sequence. device: where the cache lives; the truth lives on the CPU."""

    def __init__(self, kind: str, setting: Setting, device: str = "cpu"):
        if device == "cuda" and kind in WITHOUT_KERNELS:
            setting = setting._replace(backend="torch")
        elif device == "cuda" and setting.backend == "torch":
            setting = setting._replace(backend="triton")
        self.kind, self.setting, self.device = kind, setting, device
        self.latent = kind.startswith("latent")
        self.gen = torch.Generator().manual_seed(setting.seed)
        options = KINDS[kind] | {"sink": setting.sink, "residual": setting.residual, "page_size": 32}
        options |= {"max_cache_len": setting.capacity, "backend": setting.backend}
        if self.latent:
            self.model = _mla_model(setting.dtype).to(device)
            self.modules = mla_cases.attentions(self.model)
            cache = lb.LowBitCache(self.model, **options)
            module = self.modules[0]
            self.kv_heads, self.heads = 1, LATENT_HEADS
            self.widths = module.kv_lora_rank, module.qk_rope_head_dim
            self.query_width = module.qk_nope_head_dim + module.qk_rope_head_dim
        else:
            config = copy.deepcopy(_config(setting.layers, setting.kv_heads, setting.groups))
            parameters = _parameters(kind, setting.layers, setting.kv_heads)
            cache = lb.LowBitCache(config, **options, parameters=parameters or None)
            self.modules = [SimpleNamespace(training=False, config=None)] * setting.layers
            self.kv_heads, self.heads = setting.kv_heads, setting.kv_heads * setting.groups
            self.widths, self.query_width = (HEAD_DIM, HEAD_DIM), HEAD_DIM
        self.text, self.left = Text(cache), list[Text]()
        self.logits = torch.randn(self.heads, generator=self.gen) if setting.logits and not self.latent else None
        self.softcap = None if self.latent else setting.softcap
        self.begin(setting.rows, setting.dense)

    # ---- what is drawn --------------------------------------------------------------------------------------------

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.gen)

    def padding(self, rows: int, tokens: int, where: str) -> torch.Tensor:
        """bool `[B, S]`, False for padding; a row may have no token at all."""
        if where == "left":
            return torch.arange(tokens) >= torch.randint(0, tokens + 1, (rows, 1), generator=self.gen)
        return torch.rand(rows, tokens, generator=self.gen) < (0.7 if where else 2.0)

    def step(self, layer: int, real: torch.Tensor) -> Step:
        """Random tokens; those that are padding are NaN."""
        batch, tokens = real.shape
        streams = []
        for width in self.widths:
            x = self.random(batch, self.kv_heads, tokens, width) * (self.random(width).abs() + 0.2) + self.random(width)
            if torch.rand((), generator=self.gen) < 0.2:
                x[..., 0] *= 50  # a channel of outliers
            streams.append(x.to(self.setting.dtype).masked_fill(~real[:, None, :, None], float("nan")))
        query = self.random(batch, self.heads, tokens, self.query_width).to(self.setting.dtype)
        module = self.modules[layer] if self.latent else None
        sinks = None if self.logits is None else self.logits.to(self.setting.dtype)
        return Step(query, *streams, real, self.query_width**-0.5, self.softcap, sinks, module)

    # ---- what is done ---------------------------------------------------------------------------------------------

    def begin(self, rows: int, dense: bool) -> None:
        self.text.cache.config._attn_implementation = "sdpa" if dense else lb.ATTENTION_NAME
        self.text.dense = dense
        self.text.layers, self.text.mask = [], torch.zeros(rows, 0, dtype=torch.bool)

    def run(self, operations: list) -> None:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not read packed pages")
            try:
                for operation in operations:
                    getattr(self, type(operation).__name__.lower())(*operation)
                for text in (self.text, *self.left):
                    self.check_stored(text)
            finally:
                for text in (self.text, *self.left):
                    text.cache.reset()  # nothing of a cache stays on an MLA model
                    text.cache.config._attn_implementation = lb.ATTENTION_NAME

    def append(self, tokens: int, padding: str, text: Text | None = None) -> None:
        text = text or self.text
        if (capacity := self.setting.capacity) is None:
            tokens = min(tokens, MOST_TOKENS - text.seen)
        elif text.seen + tokens > capacity:
            keys = self.random(text.rows, self.kv_heads, tokens, self.widths[0]).to(self.setting.dtype).to(self.device)
            with pytest.raises(ValueError, match=f"max_cache_len={capacity} is too small"):
                text.cache.update(keys, keys, 0)
            tokens = capacity - text.seen
        if tokens < 1:
            return
        real = self.padding(text.rows, tokens, "" if text.dense else padding)
        mask = torch.cat([text.mask, real], 1)
        for index in range(len(self.modules)):
            step = self.step(index, real)
            if text.dense:
                self._update_dense(text, index, step)
            else:
                masked = padding or (tokens > 1 and not text.mask.all())
                self.attend_and_store(text, index, step, mask if masked else None)
        text.mask = mask

    def _rows(self, text: Text, index: int) -> list[TrueRow]:
        """The truth of a layer, made when its first tokens have come."""
        if len(text.layers) == index:
            layer = text.cache.layers[index]
            tensors = layer.spec.tensors(layer.store.state)
            tensors = {role: tuple(x.cpu() for x in own) for role, own in tensors.items()}
            storage = Storage(layer.spec, tensors, self.setting.dtype)
            none = [torch.zeros(self.kv_heads, 0, width, dtype=self.setting.dtype) for width in self.widths]
            text.layers.append([TrueRow(storage, *none) for _ in range(text.rows)])
        return text.layers[index]

    def _store(self, rows: list[TrueRow], step: Step) -> None:
        chunk = rows[0].storage.transformed(step.keys, step.values)
        for row, keys, values, real in zip(rows, *chunk, step.real, strict=True):
            row.append(keys[:, real], values[:, real])

    def attend_and_store(self, text: Text, index: int, step: Step, mask: torch.Tensor | None) -> None:
        cache, (query, keys, values) = text.cache, (x.to(self.device) for x in step[:3])
        tokens = keys.shape[2]
        length, offset = cache.get_mask_sizes(tokens, index)
        mask = None if mask is None else mask.to(self.device)
        mask = lowbit_mask(text.rows, tokens, length, text.seen, offset, attention_mask=mask)
        view, _ = cache.update(keys, values, index)
        sinks = None if step.sinks is None else step.sinks.to(self.device)
        module = self.modules[index]
        out, _ = lowbit_attention(module, query, view, view, mask, step.scaling, softcap=step.softcap, s_aux=sinks)
        rows = self._rows(text, index)
        prompt = not text.seen and tokens > 1 and mask is None and sinks is None and step.softcap is None
        self.check_output(rows, step, prompt, out.cpu())
        self._store(rows, step)

    def _update_dense(self, text: Text, index: int, step: Step) -> None:
        chunk = tuple(x.to(self.device) for x in step[1:3])
        found = text.cache.update(*chunk, index)
        rows = self._rows(text, index)
        stored = zip(*(row.stored() for row in rows), strict=True)
        past = [torch.stack(list(x)).to(self.setting.dtype) for x in stored]
        expected = rows[0].storage.as_made(*past) if text.seen else past
        spec = rows[0].storage.spec
        transforms = spec.key_transform, spec.value_transform
        for x, old, new, transform in zip(found, expected, chunk, transforms, strict=True):
            want, bound = torch.cat([old, new.cpu()], 2), 0.0
            if self.device != "cpu" and not transform.identity:
                # a matrix product inverts it, and its sums run in another order there
                bound = max(LEAST_ERROR, torch.finfo(want.dtype).eps) * float(want.abs().max())
            torch.testing.assert_close(x.cpu(), want, rtol=0, atol=bound)
        self._store(rows, step)

    def attend(self, tokens: int) -> None:
        text = self.text
        if not text.seen or text.dense or self.latent:
            return
        for index, rows in enumerate(text.layers):
            layer = text.cache.layers[index]
            step = self.step(index, self.padding(text.rows, tokens, "any"))
            state = layer.store.state
            before = [x.clone() for x in state.tensors()]
            sinks = None if step.sinks is None else step.sinks.to(self.device)
            tensors = [None if x is None else x.to(self.device) for x in step[:4]]
            out = ops.attend(StepInputs(*tensors, step.scaling, step.softcap, sinks), layer.store, layer.backend)
            self.check_output(rows, step, False, out.cpu())
            for old, new in zip(before, state.tensors(), strict=True):
                assert torch.equal(old.view(torch.uint8), new.view(torch.uint8)), "attending changed the state"

    def crop(self, tokens: int) -> None:
        text = self.text
        if tokens > text.seen:
            with pytest.raises(ValueError, match="is more than the"):
                text.cache.crop(-tokens)
            tokens %= text.seen + 1
        text.cache.crop(-tokens)
        text.mask = text.mask[:, : text.seen - tokens]
        for rows in text.layers:
            for row, length in zip(rows, text.mask.sum(1).tolist(), strict=True):
                row.crop(length)
        self.check_stored(text)

    def hide(self, hidden: tuple[int, ...], tokens: int) -> None:
        text, most = self.text, self.setting.capacity or MOST_TOKENS
        if text.dense or not text.seen or text.seen + tokens > most:
            return
        counts = torch.tensor([hidden[row % len(hidden)] for row in range(text.rows)])
        text.mask = text.mask & (text.mask.flip(1).cumsum(1).flip(1) > counts[:, None])
        for rows in text.layers:
            for row, length in zip(rows, text.mask.sum(1).tolist(), strict=True):
                row.crop(length)
        self.append(tokens, "any")
        self.check_stored(text)

    def reorder(self, rows: tuple[int, ...]) -> None:
        count = self.text.rows
        chosen = [rows[i % len(rows)] % count for i in range(count)]
        self._choose(chosen, lambda: self.text.cache.reorder_cache(torch.tensor(chosen)))

    def _choose(self, chosen: list[int], call) -> None:
        """Rows are chosen by `call`, which refuses other counts where the cache is preallocated."""
        text, capacity = self.text, self.setting.capacity
        if not text.layers or len(chosen) > MOST_ROWS:
            return
        if capacity is not None and len(chosen) != text.rows:
            with pytest.raises(ValueError, match=f"is fixed to {text.rows} rows; {len(chosen)} were requested"):
                call()
        else:
            call()
            text.select(chosen)
        self.check_stored(text)

    def repeat(self, times: int) -> None:
        rows = [row for row in range(self.text.rows) for _ in range(times)]
        self._choose(rows, lambda: self.text.cache.batch_repeat_interleave(times))

    def select(self, rows: tuple[int, ...]) -> None:
        chosen = [row % self.text.rows for row in rows]
        self._choose(chosen, lambda: self.text.cache.batch_select_indices(torch.tensor(chosen)))

    def keep(self, mask: tuple[bool, ...]) -> None:
        kept = [mask[row % len(mask)] for row in range(self.text.rows)]
        kept[0] = kept[0] or not any(kept)
        chosen = [row for row, keep in enumerate(kept) if keep]
        self._choose(chosen, lambda: self.text.cache.batch_select_indices(torch.tensor(kept)))

    def reset(self, rows: int, dense: bool) -> None:
        self.text.cache.reset()
        self.begin(rows, dense)

    def copy(self, pickled: bool, original: bool, tokens: int) -> None:
        text = self.text
        if pickled and self.latent:
            with pytest.raises(TypeError, match="cannot pickle"):
                pickle.dumps(text.cache)
            return
        if len(self.left) == 2:
            return
        twin = text.twin(pickle.loads(pickle.dumps(text.cache)) if pickled else copy.deepcopy(text.cache))
        on, other = (text, twin) if original else (twin, text)
        self.text = on
        self.append(tokens, "any", other)
        self.left.append(other)
        self.check_stored(on)

    # ---- what is compared -----------------------------------------------------------------------------------------

    def check_output(self, rows: list[TrueRow], step: Step, prompt: bool, out: torch.Tensor) -> None:
        """out `[B, S, Hq, D]`: of each row, at most twice the error of plain attention in the model's dtype, both against
        float64 over what is stored."""
        assert out.dtype == self.setting.dtype
        for index, row in enumerate(rows):
            own, found = step.row(index), out[index][step.real[index]].double()
            exact = attend(row, own, prompt, torch.float64)
            off, size, eps = (found - exact).norm(), exact.norm(), torch.finfo(out.dtype).eps
            least = max(0.5 * eps, LEAST_ERROR) * size
            allowed = (attend(row, own, prompt, out.dtype) - exact).norm()
            if off > 2 * allowed + least and found[..., 0].numel() < FEW_QUERIES:
                # of a few, plain attention may be right by chance: what rounding of each operand does is allowed too
                noisy = [(attend(row, own, prompt, torch.float64, eps) - exact).norm() for _ in range(8)]
                allowed = torch.stack([allowed, *noisy]).max()
            assert off <= 2 * allowed + least, (
                f"row {index}: off by {off / size:.2e} of the output, plain by {allowed / size:.2e}"
            )

    def check_stored(self, text: Text) -> None:
        """Counters, every byte of full pages, and every token as it is read back."""
        cache = text.cache
        assert int(cache.get_seq_length()) == text.seen
        for layer, rows in zip(cache.layers, text.layers, strict=False):
            self.check_layer(layer, rows)

    def check_layer(self, layer: LowBitLayer, rows: list[TrueRow]) -> None:
        """`check_stored` of one layer."""
        assert layer.store is not None
        state = layer.store.state
        lengths = [row.length for row in rows]
        assert state.length.tolist() == [[length] * self.kv_heads for length in lengths]
        assert state.paged.tolist() == [[row.paged] * self.kv_heads for row in rows]
        assert not state.lost.any()
        assert not state.scratch.any()
        keys, values = (x.cpu() for x in ops.read(layer.store, max(*lengths, 1), layer.backend))
        for index, row in enumerate(rows):
            if row.pages:
                pages = read_pages(state.pool, state.page_table[index, : len(row.pages)]).cpu()
                assert torch.equal(pages, torch.stack([page.encoded for page in row.pages])), f"row {index}: page bytes"
            for found, stored in zip((keys, values), row.stored(), strict=True):
                assert torch.equal(found[index, :, : row.length], stored.to(found.dtype)), f"row {index}: tokens"


def run(kind: str, setting: Setting, operations: list, device: str = "cpu") -> None:
    Machine(kind, setting, device).run(operations)
