"""The scheduler: it decides which request gets a row, which chunk is read, and which rows take a step.

A round has three parts. It admits requests while rows and pages are left. It reads prompts, at most as many tokens as a
chunk has. And it takes one decode step of all rows that have read their prompts. So a decoding row waits at most one
chunk for its next token. Prompts are always divided at multiples of the chunk size, so the text of a request does not
depend on its neighbours. Prompts that fit into the rest of the chunk are prefilled before longer ones. If a round
prefills nothing of the oldest prompt, the next round begins with it.

On a GPU the CPU receives the tokens of a step while the next step runs. If a row has ended with such a token, it has
taken one step too many, and that step's token is dropped. Between prompts the CPU receives the tokens that have arrived,
without waiting: the first token of a text is not held back until all prompts of a round are read.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList

from ..generation.stop_strings import StopStrings
from .kept_prompts import KeptPrompts
from .pool_steps import PoolSteps
from .request import Request
from .result import FinishReason, Result, described
from .row_pool import Prefix, Row
from .sampling import NO_PROBABILITIES, Drawn, Sampler, draw, on_device
from .sequence import Sequence, State
from .shared_prefixes import SharedPrefixes


@dataclass
class _Pending:
    """Drawn tokens on their way to the CPU, one for each of `n` sequences."""

    sequences: list[Sequence]
    sampled: Drawn
    tokens: torch.Tensor
    """int64 `[n]` on the CPU, valid after `arrival`; negative: the logits gave no probabilities"""
    logprobs: torch.Tensor | None
    """float32 `[n]` on the CPU, valid after `arrival`; `None`: no sequence asked for them"""
    arrival: Any = None
    """CUDA event after the copies; `None`: the tokens are on the CPU"""

    @property
    def arrived(self) -> bool:
        """Whether nothing has to wait for them."""
        return self.arrival is None or self.arrival.query()


class Scheduler:
    """Requests on one pool.

    Args:
        source: yields requests, `None` if there is none at the moment, or the `Result` of a request that could not be
            read. It is advanced only while a row is free.
        chunk_size: tokens of a prompt that are read at a time; 0: all.
        prefixes: shares full pages among requests; `None`: pages are not shared.
        kept: prompts of the `PrefixStore` that a request may continue; `None`: only prefixes of this pool's own requests are
            shared.
        tokenizer: for texts and stop strings, or `None`.
        look_ahead: number of waiting requests of which the first one that fits gets the next row. 1: requests begin in
            their order. No request is overtaken by more than twice as many others as there are rows.
    """

    def __init__(
        self,
        steps: PoolSteps,
        source: Iterable[Request | Result | None],
        chunk_size: int,
        prefixes: SharedPrefixes | None = None,
        tokenizer: Any = None,
        kept: KeptPrompts | None = None,
        look_ahead: int = 1,
    ):
        self.steps, self.pool = steps, steps.pool
        self._source: Iterator[Request | Result | None] | None = iter(source)
        self.chunk_size, self.tokenizer = chunk_size, tokenizer
        self.prefixes = SharedPrefixes(self.pool, 0) if prefixes is None else prefixes
        self.kept = kept or KeptPrompts(steps)
        self.look_ahead = look_ahead
        #: all that have not ended, in the order in which their requests came
        self.sequences: list[Sequence] = []
        self._rows_freed = 0  # sequences that have left the pool
        self._prefixes_added = 0  # times that a row's text was kept
        self._oldest_first = False  # the last round skipped the oldest prompt
        self._stepping: list[Sequence] = []  # those that the running step of the model is for
        self._pending: deque[_Pending] = deque()
        self._tokens_arrive_late = steps.device.type == "cuda"
        self.finished: deque[Result] = deque()

    def _in(self, *states: State) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.state in states]

    @property
    def prefilling(self) -> list[Sequence]:
        return self._in(State.PREFILLING)

    @property
    def decoding(self) -> list[Sequence]:
        return self._in(State.DECODING)

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have a row."""
        return self._in(State.PREFILLING, State.DECODING)

    def refresh_model(self) -> None:
        """Prepare for a model that may have changed since the last round."""
        self.steps.begin()
        self.kept.begin()

    # ---- a round --------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Do one round. Returns whether there is more to do."""
        self._admit_waiting()
        self._prefill_prompts()
        stepped = self._take_step()
        while len(self._pending) > (1 if stepped and self._tokens_arrive_late else 0):
            self._settle(self._pending.popleft())
        idle = not (self.sequences or self._pending)
        if idle and self._source is not None and not self.finished:
            time.sleep(0.001)  # the source had nothing at the moment
        return not idle or self._source is not None

    def fail(self, error: Exception) -> None:
        """`advance` raised this error: end the sequences of the step that failed. The others go on.

        Raises:
            Exception: `error`, if it was not raised by a step, or if the device cannot be used any more.
        """
        failed, self._stepping = self._stepping, []
        if not failed:
            raise error
        self.refresh_model()
        if self._tokens_arrive_late:
            torch.cuda.synchronize(self.steps.device)
        for sequence in failed:
            self.end(sequence, "error", error, keep=False)

    def cancel(self, request: Request) -> bool:
        """End a request that has a row or waits for one. Returns whether there was one."""
        for sequence in [each for each in self.sequences if each.request is request]:
            self.end(sequence, "cancelled")
        return any(result.id == request.id for result in self.finished)

    def take_finished(self) -> list[Result]:
        """Results of the sequences that have ended since the last call."""
        results = list(self.finished)
        self.finished.clear()
        return results

    # ---- admitting requests ---------------------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        blocked: list[Sequence] = []
        waiting = iter(self._in(State.WAITING))
        while self.pool.free_slots and (sequence := next(waiting, None) or self._next()) is not None:
            if sequence.tried_at < self._rows_freed and self._try_admit(sequence):
                for each in blocked:
                    each.overtaken += 1
                continue
            sequence.tried_at = self._rows_freed  # it does not fit before another one leaves
            blocked.append(sequence)
            if len(blocked) == self.look_ahead or sequence.overtaken >= 2 * self.pool.slots:
                break

    def _next(self) -> Sequence | None:
        """The first sequence of the source's next request."""
        while self._source is not None:
            try:
                request = next(self._source)
            except StopIteration:
                self._source = None
                return None
            if request is None:
                return None
            if isinstance(request, Result):
                self.finished.append(request)
                continue
            error, seed = None, request.options.get("seed")
            try:
                self.steps.check_fits(len(request.prompt_ids), request.new_tokens)
            except ValueError as refused:
                error = refused
            if seed is None:
                seed = int(torch.randint(2**62, ())) if request.config.do_sample and error is None else 0
            new = [
                Sequence(request, number, seed, request.result(sequence=number), State.FORKING)
                for number in range(request.sequences)
            ]
            new[0].state = State.WAITING
            self.sequences += new
            if error is None:
                return new[0]
            for sequence in new:
                self.end(sequence, "error", error)
        return None

    def _try_admit(self, sequence: Sequence) -> bool:
        """Give the sequence a row, or end it with an error. Returns `False` if it must wait for a row."""
        request, row = sequence.request, None
        try:
            row = self.pool.admit(request.limit, lambda: self._find_prefix(request), self.prefixes.make_room)
            if row is None:
                return False
            self._assign_row(sequence, row, State.PREFILLING)
            sequence.looked_at = self._prefixes_added
        except Exception as error:  # of a processor that cannot be made, or of a cache that cannot go on
            if row is not None:
                self.steps.leave(row)
            for each in [each for each in self.sequences if each.request is request and not each.has_row]:
                self.end(each, "error", error)
        return True

    def _find_prefix(self, request: Request) -> Prefix | None:
        """The longest stored prefix of the prompt, of other rows or of the `PrefixStore`. Adopt it before any row changes."""
        prefix = self.prefixes.find(request.prompt_ids)
        return self.kept.find(request, 0 if prefix is None else prefix.length) or prefix

    def _assign_row(self, sequence: Sequence, row: Row, state: State) -> None:
        """Assign the row to the sequence, and make what its decoding needs: sampler, criteria, stop strings, text."""
        request, model = sequence.request, self.steps.model
        sequence.sampler = Sampler.of(model, request, sequence.number, sequence.seed)
        user_criteria = StoppingCriteriaList(request.options.get("stopping_criteria") or [])
        config = copy.copy(request.config)
        config.stop_strings, stops = None, config.stop_strings
        criteria = model._get_stopping_criteria(config, user_criteria)
        checked_here = MaxLengthCriteria, EosTokenCriteria
        sequence.criteria = [each for each in criteria if each in user_criteria or not isinstance(each, checked_here)]
        if stops is not None:
            sequence.stop_strings = StopStrings(self.tokenizer, stops, prompt_ids=request.prompt_ids)
        if sequence.sampler.reads_tokens:
            ids = request.prompt_ids + [0] * request.new_tokens
            sequence.text = on_device([ids], self.steps.device)
        if (streamer := request.options.get("streamer")) is not None:
            streamer.put(torch.tensor([request.prompt_ids]))
        sequence.row, sequence.state = row, state

    # ---- reading prompts ------------------------------------------------------------------------------------------

    def _chunk(self, sequence: Sequence) -> slice:
        """The tokens of the sequence's next chunk."""
        start, end = sequence.row.length, len(sequence.request.prompt_ids)
        if self.chunk_size:
            end = min(end, (start // self.chunk_size + 1) * self.chunk_size)
        return slice(start, end)

    def _prefill_prompts(self) -> None:
        """Prefill prompts, at most as many tokens as a chunk has: those that fit into the rest of the chunk first, then the
        oldest one. After a round without the oldest one, it comes first."""
        left, oldest_was_read, overtaken = self.chunk_size, False, False
        while (prefilling := self.prefilling) and (left > 0 or left == self.chunk_size):
            oldest = prefilling[0]
            short = (each for each in prefilling if len(each.request.prompt_ids) - each.row.length <= left)
            sequence = oldest if self._oldest_first else next(short, oldest)
            self._oldest_first = False
            self._stepping = [sequence]
            self._look_for_prefix(sequence)
            chunk = self._chunk(sequence)
            if (tokens := chunk.stop - chunk.start) > left and left < self.chunk_size:
                self._stepping = []
                break
            left -= tokens
            oldest_was_read |= sequence is oldest
            overtaken |= sequence is not oldest
            logits = self.steps.prefill(sequence.row, on_device(sequence.request.prompt_ids[chunk], self.steps.device))
            if chunk.stop == len(sequence.request.prompt_ids):
                self._start_decoding(sequence, logits)
            self._stepping = []
            self._settle_arrived()
            if self.chunk_size == 0:
                break
        self._oldest_first = overtaken and not oldest_was_read

    def _look_for_prefix(self, sequence: Sequence) -> None:
        """Called before a sequence's first chunk: sequences that were admitted with it may have read its prefix
        meanwhile."""
        row, request = sequence.row, sequence.request
        if sequence.looked_at is None:
            return
        added, sequence.looked_at = sequence.looked_at < self._prefixes_added, None
        if added and row.length == 0 and (prefix := self._find_prefix(request)) is not None:
            self.pool.adopt(row, prefix)
        sequence.result.cached_tokens = row.length

    def _start_decoding(self, first: Sequence, logits: torch.Tensor) -> None:
        """The prompt is read: fork the request's other sequences, draw the first token of each, and keep the prompt."""
        first.state = State.DECODING
        sequences = [first]
        for each in self._siblings(first):
            if not self._can_fork(first):
                each.state = State.WAITING  # it reads the prompt again when there is room
                break
            self._assign_row(each, self.pool.fork(first.row, first.request.limit), State.DECODING)
            each.result.cached_tokens = first.result.cached_tokens
            sequences.append(each)
        self._draw(sequences, logits.expand(len(sequences), -1))
        self.kept.add(first.row, first.request.prompt_ids)  # waits for the device: the tokens are there afterwards
        self._share_prefix(first.row, first.request.prompt_ids)

    def _siblings(self, first: Sequence) -> list[Sequence]:
        """Sequences that are to become forks of this one."""
        return [each for each in self._in(State.FORKING) if each.request is first.request]

    def _share_prefix(self, row: Row, ids: list[int]) -> None:
        """Let later rows begin with the full pages of this one."""
        self._prefixes_added += 1
        self.prefixes.keep(row, ids, self.kept.limit)

    def _can_fork(self, sequence: Sequence) -> bool:
        row, limit = sequence.row, sequence.request.limit
        if not self.pool.free_slots:
            return False
        self.prefixes.make_room(self.pool.missing(limit, fork_of=row))
        return self.pool.missing(limit, fork_of=row) == 0

    # ---- decoding -------------------------------------------------------------------------------------------------

    def _take_step(self) -> bool:
        """Run one decode step of all rows that have a token to store. Returns whether there was such a row."""
        sequences = [each for each in self.decoding if each.tokens_drawn < each.request.new_tokens]
        if not sequences:
            return False
        self._stepping = sequences
        logits = self.steps.decode([each.row for each in sequences])
        slots = [each.row.slot for each in sequences]
        if slots != list(range(len(slots))):
            logits = logits[on_device(slots, logits.device)]
        self._draw(sequences, logits[: len(slots)])
        self._stepping = []
        return True

    def _draw(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Draw the next token of each of these sequences. The next step stores it."""
        texts = []
        for each in sequences:
            length = len(each.request.prompt_ids) + each.tokens_drawn
            texts.append(None if each.text is None else each.text[:, :length])
        sampled = draw(logits, [each.sampler for each in sequences], texts)
        slots = [each.row.slot for each in sequences]
        consecutive = slots == list(range(len(slots)))
        newest = self.steps.newest
        newest[slice(len(slots)) if consecutive else on_device(slots, newest.device)] = sampled.tokens
        for index, each in enumerate(sequences):
            if each.text is not None:
                each.text[0, len(each.request.prompt_ids) + each.tokens_drawn] = sampled.tokens[index]
            each.tokens_drawn += 1
        self._pending.append(self._send_to_cpu(sequences, sampled))

    def _send_to_cpu(self, sequences: list[Sequence], sampled: Drawn) -> _Pending:
        """Start copying drawn tokens to the CPU. Does not wait."""
        if not self._tokens_arrive_late:
            return _Pending(sequences, sampled, sampled.sent, sampled.logprobs)
        sent = sampled.sent
        host = [
            None if x is None else torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            for x in (sent, sampled.logprobs)
        ]
        for target, source in zip(host, (sent, sampled.logprobs), strict=True):
            if target is not None and source is not None:
                target.copy_(source, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record(torch.cuda.current_stream(self.steps.device))
        assert host[0] is not None
        return _Pending(sequences, sampled, host[0], host[1], arrival)

    def _settle_arrived(self) -> None:
        """`_settle` all tokens that have arrived, oldest first. Does not wait."""
        while self._pending and self._pending[0].arrived:
            self._settle(self._pending.popleft())

    def _settle(self, pending: _Pending) -> None:
        """Receive drawn tokens on the CPU, and end the sequences that are complete."""
        self._stepping = pending.sequences
        if pending.arrival is not None:
            pending.arrival.synchronize()
        self._stepping = []
        now, tokens = time.perf_counter(), pending.tokens.tolist()
        logprobs = None if pending.logprobs is None else pending.logprobs.tolist()
        for index, sequence in enumerate(pending.sequences):
            if not sequence.has_row:
                continue
            if (error := pending.sampled.errors.get(index)) is not None:
                self.end(sequence, "error", error)
                continue
            if tokens[index] < 0:
                self.end(sequence, "error", RuntimeError(NO_PROBABILITIES))
                continue
            result = sequence.result
            result.generated_tokens.append(tokens[index])
            result.timestamps.append(now)
            if logprobs is not None and sequence.sampler.logprobs:
                result.logprobs.append(logprobs[index])
            try:
                self._stream(sequence, tokens[index])
                reason = self._why_ended(sequence, tokens[index])
            except Exception as problem:  # of the caller's streamer or criterion: the other requests go on
                self.end(sequence, "error", problem)
                continue
            if reason is not None:
                self.end(sequence, reason)

    def _stream(self, sequence: Sequence, token: int) -> None:
        """Pass the token to the request's streamer, if it has one."""
        if (streamer := sequence.request.options.get("streamer")) is not None:
            streamer.put(torch.tensor([token]))

    def _why_ended(self, sequence: Sequence, token: int) -> FinishReason | None:
        """The reason why the sequence ends with this token, or `None`."""
        request, stops = sequence.request, sequence.stop_strings
        if stops is not None:
            stops.add(token)
        if token in request.end_tokens or (stops is not None and stops.reached):
            return "stop"
        reason: FinishReason | None = None
        if sequence.criteria:
            ids = on_device([sequence.ids], self.steps.device)
            no_scores: Any = None
            for criterion in sequence.criteria:
                if bool(torch.as_tensor(criterion(ids, no_scores)).all()):
                    reason = reason or ("length" if isinstance(criterion, MaxTimeCriteria) else "stop")
        if reason is None and len(sequence.result.generated_tokens) >= request.new_tokens:
            reason = "length"
        return reason

    # ---- ending ---------------------------------------------------------------------------------------------------

    def end(
        self, sequence: Sequence, reason: FinishReason, error: BaseException | None = None, keep: bool = True
    ) -> None:
        """End the sequence. Its row is free for another one.

        Args:
            keep: whether its full pages may be kept as a prefix.
        """
        if sequence.state is State.ENDED:
            return
        had_row, decoding = sequence.has_row, sequence.state is State.DECODING
        try:
            sequence.request.end_streamer()
        except Exception as problem:
            reason, error = "error", error or problem
        self._complete(sequence, reason, error)
        self.sequences.remove(sequence)
        sequence.state = State.ENDED
        if not decoding:  # another one reads the prompt
            for each in self._siblings(sequence)[:1]:
                each.state = State.WAITING
        if had_row:
            if keep:
                self._share_prefix(sequence.row, sequence.ids if decoding else sequence.request.prompt_ids)
            self.steps.leave(sequence.row)
            self._rows_freed += 1
        self.finished.append(sequence.result)

    def _complete(self, sequence: Sequence, reason: FinishReason, error: BaseException | None = None) -> None:
        """Fill in the reason, the error and the decoded text of the sequence's result."""
        result = sequence.result
        result.finish_reason = reason
        result.error = None if error is None else described(error)
        if self.tokenizer is not None and sequence.has_row:
            try:
                tokens = result.generated_tokens
                result.text, result.message = sequence.request.answer(self.steps.model, self.tokenizer, tokens)
            except Exception as problem:
                result.finish_reason, result.error = "error", described(error or problem)

    def abandon(self) -> list[Result]:
        """Cancel everything that has not ended, and return the results. Afterwards nothing runs on the device."""
        for sequence in self.sequences:
            self._complete(sequence, "cancelled")
        return [sequence.result for sequence in self.sequences]

    def rest(self) -> list[Request | Result | None]:
        """All remaining requests of the source."""
        rest, self._source = list(self._source or ()), None
        return rest

    def free(self) -> None:
        """Free the memory of the pool. The object cannot be used afterwards."""
        self.prefixes.clear()
        for sequence in self.sequences:
            sequence.text = None
            with contextlib.suppress(Exception):
                sequence.request.end_streamer()
        self._pending.clear()
        self.steps.free()
