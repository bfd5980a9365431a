"""How the next tokens of rows are chosen: transformers' logits processors, and a draw from each row's own generator.

A token is drawn as `argmax(p / e)`, where `e` is exponentially distributed (the exponential race). `torch.multinomial`
does the same for one draw. So a row with a seed writes the same text as `generate` after `torch.manual_seed` with that
seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from ..generation.generation_settings import processors_of
from .request import Request

#: processors that only look at a row's scores and have plain attributes: rows with equal processors are processed
#: together
_BY_SCORES = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "InfNanRemoveLogitsProcessor",
)
#: the error of a sequence that cannot draw its next token; `generate` raises one too
NO_PROBABILITIES = (
    "the probabilities of the next token are not finite: the model's logits are NaN or infinite, or temperature= or another "
    "option makes them so"
)
BY_SCORES = tuple(getattr(logits_process, name) for name in _BY_SCORES if hasattr(logits_process, name))


def seed_of_sequence(seed: int, sequence: int) -> int:
    """The seed of one of a request's sequences: the request's own seed for the first, seeds derived from it for the
    others."""
    if sequence == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{sequence}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(eq=False)
class Sampler:
    """How one sequence's tokens are chosen."""

    processors: LogitsProcessorList
    generator: torch.Generator | None
    """`None`: the likeliest token"""
    logprobs: bool

    @classmethod
    def of(cls, model: Any, request: Request, sequence: int, seed: int) -> Sampler:
        """The sampler that `generate` would use for this request."""
        config, options = request.config, request.options
        ids = on_device([request.prompt_ids], model.device)
        processors = processors_of(model, config, ids, options, model.device)
        generator = None
        if config.do_sample:
            generator = torch.Generator(model.device).manual_seed(seed_of_sequence(seed, sequence))
        return cls(processors, generator, bool(options.get("logprobs")))

    @property
    def kind(self) -> Hashable | None:
        """The kind of the processors: sequences of one kind are processed together. `None`: this one is processed
        separately, with its tokens."""
        if not all(type(processor) in BY_SCORES for processor in self.processors):
            return None
        return tuple((type(each).__name__, tuple(sorted(vars(each).items()))) for each in self.processors)

    def __post_init__(self) -> None:
        self.kind_known = self.kind

    @property
    def reads_tokens(self) -> bool:
        """Whether the processors look at the text so far."""
        return self.kind_known is None


@dataclass
class Drawn:
    """Tokens of a step, on the device of the model."""

    tokens: torch.Tensor
    """int64 `[n]`"""
    logprobs: torch.Tensor | None
    """float32 `[n]`, if any sampler asks for them"""
    errors: dict[int, Exception]
    """by index of the sequence, the error of its own processors; its token is then meaningless"""
    impossible: torch.Tensor | None = None
    """bool `[n]`, whether the probabilities are NaN, so that the token is meaningless; `None`: no sampler draws"""

    @property
    def sent(self) -> torch.Tensor:
        """int64 `[n]`, the tokens for the CPU; -1 if a sequence's probabilities are NaN."""
        return self.tokens if self.impossible is None else self.tokens.masked_fill(self.impossible, -1)


def on_device(numbers: Any, device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """A tensor of these numbers, copied without waiting for the device."""
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def draw(logits: torch.Tensor, samplers: Sequence[Sampler], texts: Sequence[torch.Tensor | None]) -> Drawn:
    """The next token of each sequence.

    Args:
        logits: `[n, vocabulary]`.
        texts: int64 `[1, tokens]`, for samplers that read tokens.
    """
    scores, errors = logits.to(torch.float32, copy=True), {}
    together: dict[Hashable, list[int]] = {}
    for index, sampler in enumerate(samplers):
        if not sampler.reads_tokens:
            together.setdefault(sampler.kind_known, []).append(index)
            continue
        try:
            text: Any = texts[index]
            scores[index] = sampler.processors(text, scores[index : index + 1])[0]
        except Exception as error:
            errors[index] = error
    for indices in together.values():
        processors = samplers[indices[0]].processors
        if not processors:
            continue
        nothing: Any = None
        if len(indices) == len(samplers):
            scores = processors(nothing, scores)
        else:
            selected = on_device(indices, scores.device)
            scores[selected] = processors(nothing, scores[selected])
    tokens = scores.argmax(-1)
    impossible = None
    sampling = [index for index, sampler in enumerate(samplers) if sampler.generator and index not in errors]
    if sampling:
        where: Any = slice(None) if len(sampling) == len(samplers) else on_device(sampling, scores.device)
        probabilities = scores[where].softmax(-1)
        race = torch.empty_like(probabilities)
        for row, index in zip(race, sampling, strict=True):
            row.exponential_(1, generator=samplers[index].generator)
        tokens[where] = (probabilities / race).argmax(-1)
        impossible = torch.zeros_like(tokens, dtype=torch.bool)
        impossible[where] = probabilities[:, 0].isnan()  # if one score is NaN or infinite, all of the row are NaN
    logprobs = None
    if any(sampler.logprobs for sampler in samplers):
        logprobs = scores.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return Drawn(tokens, logprobs, errors, impossible)
