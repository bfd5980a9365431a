"""Finds reusable prefixes for new rows of a pool: from a `PrefixStore`, or from the cache that a request brings."""

from __future__ import annotations

import torch

from ..cache import cache_contents
from ..cache.contents import Contents, common_prefix
from ..cache.prefix_store import Key, PrefixStore
from .pool_steps import PoolSteps
from .request import Request
from .ring_memory import sliding_indices
from .row_pool import Prefix, Row


class KeptPrompts:
    """Finds kept prompts for rows of a pool, which read the pages where they lie.

    Args:
        store: `None`: only caches of requests.
        adding: whether prompts of rows are added to the store.
    """

    def __init__(self, steps: PoolSteps, store: PrefixStore | None = None, adding: bool = True):
        self._steps, self._store, self._adding = steps, store, adding
        template = steps.template
        #: tokens of a longer text that are not worth another window
        self._slack = max(layer.spec.residual + layer.spec.page_size for layer in template.packed_layers)
        self._kind, self._sliding = cache_contents.kind_of(template), sliding_indices(template)
        self.begin()

    def begin(self) -> None:
        """The model may have changed since the last call."""
        self._key: Key | None = None

    def _key_now(self) -> Key:
        assert self._store is not None
        self._key = self._key or self._store.key_of(self._steps.template, 0)
        return self._key

    def find(self, request: Request, known: int) -> Prefix | None:
        """The longest kept beginning of a request's prompt. It must be adopted at once.

        Args:
            known: tokens that need not be read without it: shorter texts are not worth it.

        Raises:
            ValueError: the request's cache cannot go on with this prompt.
        """
        contents = None
        if request.cache is not None:
            contents = self._of_cache(request, known)
        elif self._store is not None:
            ids, known = torch.tensor(request.prompt_ids), known + self._slack if known else 0
            contents = self._store.find(self._steps.template, [ids], self._key_now(), known).contents
        if contents is None:
            return None
        sliding = (contents.native_layers[index] for index in self._sliding)
        rings = [(tokens["keys"], tokens["values"]) for tokens in sliding if tokens]
        return self._steps.pool.kept(contents, rings)

    def _of_cache(self, request: Request, known: int) -> Contents | None:
        cache, ids, wrong = request.cache, torch.tensor(request.prompt_ids), "past_key_values cannot go on"
        assert cache is not None
        cache.check_model(self._steps.model)
        if cache_contents.kind_of(cache) != self._kind:
            raise ValueError(f"{wrong}: it stores other formats, another window or calibration than this pool")
        if cache.read_lengths is not None and not cache.read_lengths.suits(cache, len(ids)):
            raise ValueError(f"{wrong}: its rotary embeddings are those of a text of another length")
        contents = cache_contents.take(cache, shared=True)
        stored = contents.lengths.tolist()
        if contents.text is None or stored != [contents.text.shape[1]]:
            raise ValueError(f"{wrong}: it must hold one row whose text it knows, as lb.generate and lb.Chat leave it")
        match = min(common_prefix(contents.text[0].cpu(), ids), len(ids) - 1)
        tokens = contents.restorable(match)
        if self._sliding and match < stored[0]:
            raise ValueError(
                f"{wrong}: of its {stored[0]} tokens the prompt begins with {match}, and sliding-window layers need all of them"
            )
        if tokens == 0:
            raise ValueError(f"{wrong}: of its {stored[0]} tokens the prompt begins with {match}, too few to use")
        if tokens <= known:
            return None
        return contents.first(tokens)

    def add(self, row: Row, ids: list[int]) -> None:
        """Keep the contents of a row that holds these tokens. Waits for the device."""
        if self._store is not None and self._adding:
            self._store.add(self._steps.as_cache(row), [torch.tensor(ids)], self._key_now())

    @property
    def limit(self) -> float:
        """Bytes of kept prompts that the pool may hold although no row reads them."""
        return 0 if self._store is None else self._store.max_bytes
