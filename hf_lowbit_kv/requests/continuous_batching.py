"""transformers' continuous batching on packed pages: its scheduler and sampling, our rows and steps.

transformers keeps the requests, chooses the next batch, and samples tokens. This file gives it three classes.
`PackedCache` says whether a request fits, and finds shared prefixes. `PackedRunner` runs a batch on a pool of rows.
`PackedManager` connects the two. Nothing global is replaced.

A request gets a row only if its prompt and all tokens that it may write fit. So no request is ever preempted.

The file was written for the versions in `paged_calls.SUPPORTED`, from their sources. Import it with no other version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

from ..cache.length_rope import length_rope
from ..cache.low_bit_cache import LowBitCache
from ..generation.enable import Enabled
from ..presets import get_preset
from .memory_budget import USABLE
from .pool_models import check_tokens
from .pool_steps import PoolSteps, exclusive_use, new_pool
from .row_pool import Row
from .sampling import on_device
from .shared_prefixes import SharedPrefixes

#: default for the tokens of a batch: prompts are read in pieces of at most this many tokens
BATCH_TOKENS = 2048


class _NoSectors:
    """Takes the place of transformers' memory sectors."""

    def try_to_free_sectors(self) -> None:
        """Does nothing: a page of the pool is free as soon as its reference count is 0."""


class PackedCache(PagedAttentionCache):
    """Answers transformers' scheduler, which asks for room, with the room in a pool of rows.

    Args:
        steps: steps of the model on its pool.
        batch_tokens: largest number of tokens of a batch.
        prefixes: shares full pages.
    """

    def __init__(self, steps: PoolSteps, batch_tokens: int, prefixes: SharedPrefixes):
        self.steps, self.prefixes = steps, prefixes
        self.rows: dict[str, Row] = {}
        self._limits: dict[str, int] = {}
        # attributes that other classes of transformers read
        self.config, self.device, self.dtype = steps.model.config, steps.device, steps.model.dtype
        self.max_batch_tokens, self.num_blocks = batch_tokens, next(iter(steps.pool.page_pools.values())).count
        self.max_blocks_per_request = self.max_decode_fast_path_length = 0
        self.cache_allocators, self.layer_to_allocator = {}, {}
        self.pool: Any = _NoSectors()
        self.use_prefix_sharing = self.allow_block_sharing = prefixes.sharing
        # nothing is read through an index, so no index has to be large
        self.read_cache_limit, self.max_tokens_read, self.bytes_per_sector, self.num_sectors = 0, 1, 1, self.num_blocks

    # ---- room -----------------------------------------------------------------------------------------------------

    def check(self, state: Any) -> None:
        """Raise `ValueError` if a request can never be served. Called before the request waits for a row."""
        if not state.initial_tokens:
            raise ValueError("the prompt is empty: give it at least one token")
        check_tokens(self.steps.model, state.initial_tokens)  # a wrong id would end all requests of its batch
        if state.max_new_tokens is None:
            raise ValueError("max_new_tokens=None is not allowed: a row is kept free for all tokens that it may write")
        limit = len(state.initial_tokens) + state.max_new_tokens
        if (rope := length_rope(self.steps.model)) is not None:
            rope.refuse_row(limit)
        self.steps.check_fits(len(state.initial_tokens), state.max_new_tokens)
        self._limits[state.request_id] = limit

    def _enter(self, request_id: str, ids: Sequence[int]) -> Row | None:
        """A row for a request, which begins with the known prefix of its prompt; `None` if there is no room now."""
        pool, limit = self.steps.pool, self._limits[request_id]
        if not pool.free_slots:
            return None
        row = pool.admit(limit, lambda: self.prefixes.find(ids), self.prefixes.make_room)
        if row is not None:
            self.rows[request_id] = row
        return row

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        row = self.rows.get(request_id) or self._enter(request_id, prompt_ids)
        return 0 if row is None else row.length

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        if state.request_id in self.rows:
            return True
        if dry_run:
            return self.steps.pool.free_slots > 0
        # without a prefix: transformers has looked for one before, and reads the whole prompt now
        return self._enter(state.request_id, ()) is not None

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self._limits.pop(request_id, None)
        if (row := self.rows.pop(request_id, None)) is not None:
            self.steps.leave(row)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        for request_id in list(self.rows):
            self.free_blocks(request_id)
        if clear_ledgers:
            self.evict_cached_blocks()

    def reset(self) -> None:
        self.free_all_requests(clear_ledgers=True)

    def compute_free_capacity(self, relative: bool = True) -> float:
        """Memory is never low, because admitted requests have all the room that they will need."""
        return 1.0

    # ---- forks and shared prefixes --------------------------------------------------------------------------------

    def prepare_fork_request(self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: Any) -> list[str]:
        pool, source = self.steps.pool, self.rows[src_state.request_id]
        forked: list[str] = []
        for request_id in dst_req_ids:
            self._limits[request_id] = source.limit
            if not pool.free_slots or pool.missing(source.limit, fork_of=source) > 0:
                break
            self.rows[request_id] = pool.fork(source, source.limit)
            forked.append(request_id)
        return forked

    def perform_cache_copy(self, copy_src_and_dst: Any) -> None:
        """Does nothing: the pool has copied the parts that a fork does not share."""

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        if not self.prefixes.sharing:
            return {}
        before, length = state.current_len(), state.current_len() + request_len
        pool = self.steps.pool
        new = len(pool.full_lengths(length)) - len(pool.full_lengths(before))
        return {"packed": new} if new else {}

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        row = self.rows.get(state.request_id)
        if complete_blocks and row is not None:
            self.prefixes.keep(row, state.initial_tokens + state.generated_tokens)

    def evict_cached_blocks(self) -> bool:
        if not len(self.prefixes):
            return False
        self.prefixes.clear()
        return True

    # ---- methods that only transformers' own attention needs ------------------------------------------------------

    def extend_read_and_write_indices(self, request_id, past_length, query_length, read_index, write_index) -> None:
        """Makes no index, because a row's tables say where its pages are."""

    def fill_block_table(self, request_id, past_length, query_length, block_table) -> None:
        """Like `extend_read_and_write_indices`."""


class PackedRunner(ModelRunner):
    """Runs one of transformers' batches on the pool: each chunk of a prompt separately, and all rows that decode in one
    step."""

    cache: PackedCache
    inputs_and_outputs: Any
    #: requests of the last batch
    _running: frozenset[str] = frozenset()

    def compute_batch(self, model: Any, batch_data: dict) -> None:
        """Compute the batch's logits, and sample new tokens as transformers does."""
        # `_forward_process_and_sample` reads this: the logits are those of the new tokens only
        batch_data["logits_to_keep"] = batch_data["logits_indices"]
        before = self._running
        self._running = frozenset(each.state.request_id for each in self.inputs_and_outputs.requests_in_batch)
        with exclusive_use(model):
            if (
                not self._running <= before
            ):  # checking the whole model takes longer than a step, so this is not done in each step
                self.cache.steps.begin()
            forward: Any = self._forward  # takes the place of the model
            self._forward_process_and_sample(forward, batch_data, *self.inputs_and_outputs.get_cb_kwargs())

    def _forward(self, input_ids: torch.Tensor, **inputs: Any) -> SimpleNamespace:
        """`logits` `[1, requests with a new token, vocabulary]`."""
        steps, rows = self.cache.steps, self.cache.rows
        ids, first = input_ids[0].long(), 0
        logits: list[Any] = []
        decoding: list[tuple[int, Row, int]] = []  # place among the logits, row, place of its token
        for each in self.inputs_and_outputs.requests_in_batch:
            row, count = rows[each.state.request_id], each.query_length
            if count == 1 and row.length:
                decoding.append((len(logits), row, first))
                logits.append(None)
            else:
                logits.append(steps.prefill(row, ids[first : first + count]))
            first += count
        batch = self.inputs_and_outputs.requests_in_batch
        if decoding:
            slots = on_device([row.slot for _, row, _ in decoding], ids.device)
            steps.newest[slots] = ids[on_device([index for _, _, index in decoding], ids.device)]
            rows_logits = steps.decode([row for _, row, _ in decoding])[slots]
            # as a rule; logits of many rows are large, and need not be put together again
            if len(decoding) == len(batch) and all(each.has_new_token for each in batch):
                return SimpleNamespace(logits=rows_logits[None])
            for (index, _, _), of_row in zip(decoding, rows_logits, strict=True):
                logits[index] = of_row
        wanted = [x for x, each in zip(logits, batch, strict=True) if each.has_new_token]
        if not wanted:  # only chunks of prompts: no token is drawn
            return SimpleNamespace(logits=logits[0].new_empty(1, 0, len(logits[0])))
        return SimpleNamespace(logits=torch.stack(wanted)[None])


class _Checking:
    """A mixin for transformers' schedulers: a request that can never be served gets its own error."""

    cache: PackedCache

    def add_waiting_request(self, state: Any) -> None:
        self.cache.check(state)
        super().add_waiting_request(state)  # type: ignore[misc]


def _check_ranks(model: Any) -> None:
    """Raise `RuntimeError` if another tensor-parallel process has died. Every manager makes a new process group, and
    would otherwise wait for that process until `cpu_group_timeout` is over."""
    mesh = DistributedHelper.extract_tp_mesh(getattr(model, "_device_mesh", None))
    if mesh is not None:
        torch.distributed.all_reduce(torch.zeros(1, device=model.device), group=mesh.get_group())


class PackedManager(ContinuousBatchingManager):
    """transformers' manager with packed pages.

    Args:
        model: unwrapped.
        enabled: the settings of `lb.enable` for it.
        make_cache: makes an empty cache for this many tokens. All others: transformers' own.
    """

    def __init__(
        self,
        model: Any,
        enabled: Enabled,
        make_cache: Callable[[int], LowBitCache],
        config: ContinuousBatchingConfig,
        **others: Any,
    ):
        self.made_for, self._make_template = enabled, make_cache
        self._batching, self._hints = config, others.get("workload_hints")
        _check_ranks(model)
        super().__init__(model=model, continuous_batching_config=config, **others)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Switches nothing: the model attends with `lowbit_kv`, or the first batch raises."""

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        if self.batch_processor is not None:
            self.batch_processor.reset()
            return self.batch_processor
        cache = self._make_cache()
        config = self.continuous_batching_config
        config.num_blocks, config.max_batch_tokens = cache.num_blocks, cache.max_batch_tokens
        config.max_blocks_per_request, config.max_requests_per_batch = 0, cache.steps.pool.slots
        config.use_cuda_graph, config.use_async_batching = (False, False), False  # steps are recorded by `PoolSteps`
        config.varlen_compile_config = config.decode_compile_config = None
        self._use_prefix_sharing = cache.use_prefix_sharing
        base: Any = SCHEDULER_MAPPING[config.scheduler_type]
        scheduler = type(f"Packed{base.__name__}", (_Checking, base), {})(
            cache=cache, safety_margin=0.0, max_requests_per_batch=config.max_requests_per_batch
        )
        processor = ContinuousBatchProcessor(
            cache=cache,
            config=self.model.config.get_text_config(),
            generation_config=self.generation_config,
            continuous_batching_config=config,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue if self.is_tp_driver else None,
            cancel_queue=self.cancel_queue if self.is_tp_driver else None,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )
        # between batches rows are moved and pages are given; a single stream keeps the order
        processor.inputs_and_outputs.compute_stream = None
        processor.model_runner = PackedRunner(
            logit_processor=self.logit_processor,
            cb_config=config,
            inputs_and_outputs=processor.inputs_and_outputs,
            cache=cache,
            do_sample=processor.do_sample,
            return_logprobs=processor.return_logprobs,
        )
        return processor

    def _make_cache(self) -> PackedCache:
        """Measure the free memory, and allocate the pool."""
        model, batching, hints = self.model, self._batching, self._hints
        batch_tokens, limits = batching.max_batch_tokens or BATCH_TOKENS, None
        if hints is not None and hints.num_requests and hints.max_prompt_length and hints.max_generated_length:
            limits = [hints.max_prompt_length + hints.max_generated_length] * hints.num_requests
        tokens = None
        if batching.num_blocks is not None:
            tokens = batching.num_blocks * get_preset(self.made_for.preset).spec().page_size
        with exclusive_use(model):
            steps, prefixes = new_pool(
                model,
                self._make_template,
                batch_tokens,
                share=USABLE if batching.max_memory_percent is None else batching.max_memory_percent,
                limits=limits,
                may_be_shorter=True,  # hints have the longest prompt, not the length of each
                max_rows=batching.max_requests_per_batch,
                tokens=tokens,
                share_prefixes=batching.allow_block_sharing,
                record=batching.use_cuda_graph is not False,
                agree=self._least_of_all_ranks,
            )
        return PackedCache(steps, max(batch_tokens, steps.pool.slots), prefixes)

    def _least_of_all_ranks(self, numbers: list[int]) -> list[int]:
        if self.distributed_helper.tp_size == 1:
            return numbers
        least = torch.tensor(numbers, device=self.model.device, dtype=torch.int64)
        self.distributed_helper.tp_all_reduce_min(least)
        return least.tolist()
