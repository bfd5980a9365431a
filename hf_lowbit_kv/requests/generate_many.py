"""`generate_many`: many requests on one model, each with its own length and options. They run on a pool of rows with
packed pages."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from ..byte_sizes import parse_size
from ..cache.cache_options import PresetOptions
from ..cache.low_bit_cache import LowBitCache
from ..cache.prefix_store import PrefixStore
from ..cache.served_models import tp_size, unwrap_generating
from ..calibration.progress import Report, reporting
from ..generation.call_options import options_of_cache
from ..generation.kept_caches import kept_caches
from ..presets import PresetName
from ..storage.layer_spec import check_count
from .kept_prompts import KeptPrompts
from .pool_models import empty_caches, longest_row
from .pool_steps import exclusive_use, new_pool
from .request import Request, RequestReader
from .result import Interrupted, Result, described
from .scheduler import Scheduler

#: default for the tokens of a prompt that are read at a time
CHUNK_SIZE = 2048


def generate_many(
    model: Any,
    requests: Iterable[Any],
    preset: PresetName | str | None = None,
    *,
    tokenizer: Any = None,
    memory: int | str | None = None,
    max_rows: int | None = None,
    prefill_chunk_size: int | None = None,
    prefixes: PrefixStore | None = None,
    share_prefixes: bool = True,
    as_completed: bool = False,
    progress: bool = True,
    calibration: Any = None,
    allow_other_weights: bool = False,
    cache_options: PresetOptions | Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Answer many requests at once. When a request ends, the next one takes its place at the next step.

        results = lb.generate_many(model, prompts, tokenizer=tokenizer, max_new_tokens=256)
        print(results[0].text)

    Args:
        model: a causal language model whose layers are packed or attend to a sliding window; PEFT or `torch.compile` may
            wrap it. Models that also read images answer requests of text.
        requests: a list or an iterator. A request is a text, token ids, a list of messages, or a dict with one of
            `"prompt"`, `"messages"`, `"input_ids"`, optionally an `"id"`, and its own options. With `"past_key_values"`, a
            cache that holds the beginning of the prompt (such as `chat.cache`), only the rest is read; the cache does not
            change. The iterator is advanced whenever a row is free. It may yield `None` while it has none.
        preset: see `preset_names`; `None`: `kivi-4-sink`.
        tokenizer: for texts, messages and `stop_strings`; without it results have no text.
        memory: bytes of the pool (pages, windows, rings, tables, kept prefixes), or a size such as `"24GB"`. Default: 90 % of
            the memory that is free after the model has read one chunk. A list never gets a larger pool than it needs.
        max_rows: largest number of sequences at once. Default: as many as fit, up to 128.
        prefill_chunk_size: prompts are read in chunks that end at multiples of this number; `0`: whole prompts. A
            decoding row waits at most one chunk for its next token. Default: 2048.
        prefixes: a `PrefixStore` of prompts that other calls have read. Rows read its pages where they lie. Prompts of this
            call are added to it.
        share_prefixes: whether prompts with the same beginning share full pages. Tokens after a shared prefix attend
            to packed pages instead of their own chunk, so a text may differ a little. With `False`, texts do not depend
            on other requests. Models with sliding windows do not share.
        as_completed: return an iterator over results in the order in which they end. Its `close()` frees all rows.
        progress: show a bar on stderr, if that is a terminal.
        calibration: for presets that need one, as for `LowBitCache`.
        allow_other_weights: accept a calibration that was made for other weights, as for `LowBitCache`.
        cache_options: for `from_preset`: `residual`, `backend`, ...
        **options: options of all requests; a request's own options override them. Those of `model.generate`:
            `max_new_tokens`, `do_sample`, `temperature`, `stop_strings`, `logits_processor`, `stopping_criteria`,
            `num_return_sequences`, ... Also `seed`, which determines a request's random draws; `logprobs=True`;
            `chat_template_kwargs`; `streamer` (for a single request).

    Returns:
        A list of `Result`, in the order of the requests; `num_return_sequences` of one request follow each other.

    Raises:
        ValueError: an option of the call cannot be served (beams, assistants, images, unknown names), or no request of a
            list; the model has recurrent layers, or there is too little memory. Nothing is allocated then. If
            single requests cannot be served, because of their prompt or their own options, they get a result with an error
            instead.
        TypeError: an argument, or each request of a list, has another type. OSError: there is no such calibration.
        Interrupted: Ctrl-C was pressed. Its `results` have the texts so far.

    Example:
        >>> requests = ["one", {"prompt": "two", "max_new_tokens": 2}]
        >>> results = lb.generate_many(model, requests, tokenizer=tokenizer, max_new_tokens=4)
        >>> [len(result.generated_tokens) <= most for result, most in zip(results, (4, 2))]
        [True, True]
    """
    inner = unwrap_generating(model)
    if (ranks := tp_size(inner)) > 1:
        raise ValueError(
            f"the model's weights are spread over {ranks} processes (tensor parallelism), which would not schedule alike. Use "
            "lb.generate, or model.generate_batch under lb.enable, where rank 0 decides"
        )
    check_count("max_rows", max_rows, optional=True, unit="rows")
    check_count("prefill_chunk_size", prefill_chunk_size, least=0, optional=True)
    size = None if memory is None else parse_size(memory, "memory")
    if isinstance(requests, (str, bytes, Mapping, torch.Tensor)):  # their parts would be requests
        raise TypeError(f"requests must be a list or an iterator of requests, not {type(requests).__name__}")
    if options.get("streamer") is not None:
        raise ValueError(
            "streamer is not allowed for all requests: give each its own, {'prompt': ..., 'streamer': ...}"
        )
    reader = RequestReader(inner, tokenizer, options)
    listed: list[Request] | None = None
    refused: list[Result] = []
    if isinstance(requests, Sequence):
        listed, refused = _read_list(reader, requests)
    make_template = empty_caches(inner, preset, options_of_cache(cache_options, calibration, allow_other_weights))
    run = _Run(
        inner,
        make_template,
        _read(reader, requests)
        if listed is None
        else [*refused, *(listed if as_completed else _longest_first(listed))],
        listed,
        refused,
        tokenizer,
        size,
        max_rows,
        CHUNK_SIZE if prefill_chunk_size is None else prefill_chunk_size,
        share_prefixes,
        prefixes,
    )
    if as_completed:
        return _as_completed(run)
    with reporting(progress) as report:
        try:
            return _in_order(run.results(all_of_them=True, report=report))
        finally:
            run.free()


def _longest_first(requests: list[Request]) -> list[Request]:
    """Answers that may become the longest begin first, so that few rows are left at the end. The order is invisible,
    except where a request has a streamer."""
    if any(request.options.get("streamer") is not None for request in requests):
        return requests
    return sorted(requests, key=lambda request: -request.new_tokens)


def _in_order(results: list[Result]) -> list[Result]:
    return sorted(results, key=lambda result: (result.index, result.sequence))


def _as_completed(run: _Run) -> Iterator[Result]:
    try:
        while results := run.results():
            yield from results
    finally:
        run.free()


def _read_list(reader: RequestReader, requests: Sequence[Any]) -> tuple[list[Request], list[Result]]:
    """The requests of a list that can be served, and results with errors for the others. Raises the first error if none can
    be served: a list of one, or a forgotten tokenizer."""
    listed, refused, first = list[Request](), list[Result](), None
    for index, request in enumerate(requests):
        try:
            listed.append(reader.read(request, index))
        except (TypeError, ValueError) as error:
            first = first or error
            refused.append(_refused(request, index, error))
    if first is not None and not listed:
        raise first
    return listed, refused


def _read(reader: RequestReader, requests: Iterable[Any]) -> Iterator[Request | Result | None]:
    """The requests of an iterator. A bad request becomes a result with an error."""
    index = 0
    for request in requests:
        if request is None:
            yield None
            continue
        try:
            yield reader.read(request, index)
        except (TypeError, ValueError) as error:
            yield _refused(request, index, error)
        index += 1


def _refused(request: Any, index: int, error: Exception) -> Result:
    given = request if isinstance(request, Mapping) else {}
    name, streamer = given.get("id"), cast(Any, given.get("streamer"))
    with contextlib.suppress(Exception):  # it may be no streamer
        streamer.end()
    return Result(str(index if name is None else name), index, finish_reason="error", error=described(error))


class _Run:
    """One call of `generate_many`. It owns its pool. Between results the model is left unchanged."""

    def __init__(
        self,
        model: Any,
        make_template: Callable[[int], LowBitCache],
        source: Iterable[Request | Result | None],
        listed: list[Request] | None,
        refused: list[Result],
        tokenizer: Any,
        memory: int | None,
        max_rows: int | None,
        chunk_size: int,
        share_prefixes: bool,
        store: PrefixStore | None,
    ):
        self._store, self._refused = store, refused
        self.model, self._make_template, self._source, self._listed = model, make_template, source, listed
        self._tokenizer, self._memory, self._max_rows = tokenizer, memory, max_rows
        self._chunk_size, self._share = chunk_size, share_prefixes
        self._scheduler: Scheduler | None = None
        self._over = listed == []
        self._counted = 0

    @property
    def _total(self) -> int:
        """Number of sequences known so far."""
        if self._listed is not None:
            return len(self._refused) + sum(request.sequences for request in self._listed)
        return self._counted + (0 if self._scheduler is None else len(self._scheduler.sequences))

    def results(self, all_of_them: bool = False, report: Report | None = None) -> list[Result]:
        """Results of the next requests that end, or of all requests; empty if there are no more. Calls from several
        threads run one after the other.

        Args:
            report: called with the number of ended requests.
        """
        if self._over:
            return []
        results: list[Result] = []
        try:
            with exclusive_use(self.model), kept_caches(self.model).released_on_error():
                if self._scheduler is None:
                    self._scheduler = self._begin()
                else:
                    self._scheduler.steps.check_model()
                    self._scheduler.refresh_model()
                more = True
                while more and (all_of_them or not results):
                    more = self._scheduler.advance()
                    if finished := self._scheduler.take_finished():
                        results += finished
                        self._counted += len(finished)
                        if report is not None:
                            report("Requests", self._counted, self._total)
        except KeyboardInterrupt as interruption:
            results += self._cancelled()
            self.free()
            traceback.clear_frames(interruption.__traceback__)  # they refer to the pool's tensors
            raise Interrupted(_in_order(results)) from None
        except BaseException:
            self.free()
            raise
        if not more and not results:
            self.free()
        return results

    def _cancelled(self) -> list[Result]:
        """For an interrupted call: results of all requests that have not ended, and of requests of a list that have not
        begun."""
        scheduler = self._scheduler
        results: list[Result] = []
        rest: list[Request | Result | None] = [*self._refused, *(self._listed or [])]
        if scheduler is not None:
            results = [*scheduler.take_finished(), *scheduler.abandon()]
            rest = [] if self._listed is None else scheduler.rest()
        results += [each for each in rest if isinstance(each, Result)]
        return results + [
            request.result("cancelled", number)
            for request in rest
            if isinstance(request, Request)
            for number in range(request.sequences)
        ]

    def _begin(self) -> Scheduler:
        """Find out how much memory there is, and allocate the pool."""
        model, listed = self.model, self._listed
        limits, chunk = None, self._chunk_size or CHUNK_SIZE
        if listed is not None:
            limits = [each.limit for each in listed for _ in range(each.sequences)]
            limit = longest_row(model)
            lengths = [len(each.prompt_ids) for each in listed if limit is None or each.limit <= limit]
            longest = max(lengths, default=1)
            chunk = min(self._chunk_size or longest, longest)
        steps, prefixes = new_pool(
            model,
            self._make_template,
            chunk,
            memory=self._memory,
            limits=limits,
            max_rows=self._max_rows,
            share_prefixes=self._share,
        )
        kept = KeptPrompts(steps, self._store)
        return Scheduler(steps, self._source, self._chunk_size, prefixes, self._tokenizer, kept)

    def free(self) -> None:
        """Free the memory of the pool, and end the streamers of requests that have not ended."""
        self._over = True
        for request in self._listed or ():
            with contextlib.suppress(Exception):
                request.end_streamer()
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            scheduler.free()
