"""`PrefixStore`: keeps texts that were read, so that another text with the same beginning need not read it again."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..byte_sizes import parse_size
from ..folders import named_path
from ..storage.content_digests import fingerprint_digest, fingerprint_of, rows_digest
from . import cache_contents, saved_cache
from .contents import Contents, joined, trim
from .length_rope import length_rope
from .low_bit_cache import LowBitCache
from .prompt_folder import PromptFolder
from .summary import Summary, table


class Match(NamedTuple):
    """The stored prefix of a text."""

    tokens: int
    """tokens of every row that need not be read"""
    common: int
    """tokens that the text has in common with a stored one; more than `tokens` if not all of them can be restored"""
    contents: Contents | None = None
    """those tokens, in the store's pages"""


class Key(NamedTuple):
    """Identifies model and cache: texts match only under the same key."""

    digest: str
    """of the model with its present weights and adapters, the cache's formats and calibration, and rotary embeddings"""
    header: dict[str, Any]
    """the description of model and cache in a file"""


class PrefixStore:
    """A prefix cache: keeps the caches of texts that `lb.generate` and models under `lb.enable` have processed. If a prompt
    begins like a stored text, only the rest of the prompt is prefilled.

        store = lb.PrefixStore("8GB")
        tokens = lb.generate(model, ids, max_new_tokens=256, prefixes=store)

    Texts match only for the same model with the same weights, and the same kind of cache (formats, window,
    calibration). If texts diverge in the 16-bit window of the stored one, all common tokens match. Else the match ends with
    a page, at least `residual` tokens earlier. Later tokens are prefilled again. They attend to packed pages, so the output
    may differ from that of a prompt that is prefilled whole. For models with sliding or recurrent layers only a whole
    stored text matches.

    Args:
        max_bytes: limit for texts on the model's device: a number, or `"8GB"` (8 * 10^9). The least recently used text
            is removed first. Without a folder, the first text that is larger causes a warning.
        folder: removed texts are moved here; several stores may share it. `None`: they are dropped. A text that cannot be
            written, e.g. because the disk is full, is dropped with a warning. A damaged text is not used and causes a
            warning.
        max_folder_bytes: limit for the files; `None`: no limit.

    Raises:
        ValueError: a size is not understood, or `folder` is empty. OSError: the folder cannot be made, or is a file.

    Example:
        >>> store = lb.PrefixStore("1GB")
        >>> for question in ("Why?", "How?"):
        ...     ids = tokenizer(text + question, return_tensors="pt").to(model.device)
        ...     tokens = lb.generate(model, **ids, max_new_tokens=8, prefixes=store)
        >>> store.hits
        1
    """

    def __init__(
        self, max_bytes: int | str = "8GB", folder: str | Path | None = None, max_folder_bytes: int | str | None = None
    ):
        self.max_bytes = parse_size(max_bytes, "max_bytes")
        limit = None if max_folder_bytes is None else parse_size(max_folder_bytes, "max_folder_bytes")
        self._folder = None if folder is None else PromptFolder(named_path("folder", folder), limit)
        self._prompts: list[Contents] = []  # the most recently used text comes last
        self._lock = threading.RLock()
        self.hits = self.misses = self.tokens_saved = self.removed = 0
        self._warned_of_size = False

    def __copy__(self) -> PrefixStore:
        """The same store, also for `copy.deepcopy`: calls of a model and of its copies share texts. Their keys have the
        weights of the model."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixStore:
        return self

    # ---- contents -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of texts on the device."""
        return len(self._prompts)

    @property
    def nbytes(self) -> int:
        """Bytes of the texts on the device. Pages that several texts share count once."""
        with self._lock:
            tensors = {id(x): x.nbytes for prompt in self._prompts for x in prompt.tensors()}
            return sum(tensors.values())

    def clear(self) -> None:
        """Drop all texts, the files too. Raises `OSError` if files cannot be removed."""
        with self._lock:
            self._prompts.clear()
            if self._folder is not None:
                self._folder.clear()

    def load(self, cache: LowBitCache) -> int:
        """Read texts of the folder that suit this cache, before they are needed: as many as there is room for. Returns
        how many suitable texts are on the device then."""
        with self._lock:
            seed, device = self.key_of(cache, 0).digest, cache.model.get("looked up").device
            loaded = {prompt.ids.numpy().tobytes() for prompt in self._prompts if prompt.seed == seed}
            if (folder := self._folder) is not None:
                for path, ids in folder.texts(seed):
                    if ids.numpy().tobytes() in loaded or (prompt := folder.read(path, device)) is None:
                        continue
                    if not prompt.suits(cache.model.get("looked up")):
                        continue
                    self._prompts.insert(0, prompt)  # the next one is older
                    if self.nbytes > self.max_bytes:
                        self._prompts.remove(prompt)
                        if prompt.nbytes <= self.max_bytes:
                            break
            return sum(prompt.seed == seed for prompt in self._prompts)

    def save(self) -> None:
        """Write all texts to the folder. They stay on the device too.

        Raises:
            ValueError: the store has no folder. OSError: the files cannot be written.
        """
        if self._folder is None:
            raise ValueError("folder=None: the store has no folder to save its texts in")
        with self._lock:
            for prompt in self._prompts:
                self._folder.save(prompt)

    def summary(self) -> Summary:
        """A table of texts, bytes and counters, as a string that notebooks show in HTML."""
        with self._lock:
            lookups = self.hits + self.misses
            folder = "none" if self._folder is None else f"{len(self._folder)} texts in {str(self._folder.path)!r}"
            rows = {
                "texts": f"{len(self)}, {sum(len(prompt.ids) for prompt in self._prompts)} tokens",
                "bytes": f"{self.nbytes} of {self.max_bytes}, shared pages counted once",
                "folder": folder,
                "hits": f"{self.hits} of {lookups} lookups, {self.tokens_saved} tokens not read again",
                "removed": f"{self.removed} texts, because memory was short",
            }
            return table("PrefixStore", rows)

    def __repr__(self) -> str:
        folder = "" if self._folder is None else f", {len(self._folder)} in {str(self._folder.path)!r}"
        used = f"{self.nbytes} of {self.max_bytes} bytes"
        counts = f"hits={self.hits}, misses={self.misses}, tokens_saved={self.tokens_saved}"
        return f"PrefixStore({len(self)} texts, {used}{folder}, {counts})"

    # ---- used by calls --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def restore(self, cache: LowBitCache, rows: list[torch.Tensor]) -> Match:
        """Put the longest stored prefix of these texts into an empty cache: the same number of tokens of each, and at
        least one token less than the shortest text.

        Args:
            rows: ids int64 `[n]` on the CPU, without padding.
        """
        with self._lock:
            match = self.find(cache, rows)
            if match.contents is not None:
                cache_contents.put(cache, match.contents, cache.model.get("looked up"))
                if cache.read_lengths is not None:
                    cache.read_lengths.restored(max(map(len, rows)))
            return match._replace(contents=None)

    @torch.no_grad()
    def find(self, cache: LowBitCache, rows: list[torch.Tensor], key: Key | None = None, known: int = 0) -> Match:
        """The longest stored prefix of these texts, as for `restore`.

        Args:
            cache: a cache of the kind to restore.
            key: the cache's key, if model and cache have not changed since it was computed.
            known: tokens that another source can already restore; shorter prefixes are not returned.
        """
        with self._lock:
            longest = max(map(len, rows))
            if (rope := length_rope(cache.model.get("looked up"))) is not None and not rope.settled(longest):
                return self._missed(0, known)
            model = cache.model.get("looked up")
            kind = (key or self.key_of(cache, longest)).digest, model
            loaded = [self._load_longer(*kind, ids, known) for ids in rows]
            try:
                return self._match([self._best(*kind, ids) for ids in rows], rows, known)
            finally:
                if any(loaded):
                    self._make_room()

    def _match(self, best: list[tuple[Contents | None, int]], rows: list[torch.Tensor], known: int) -> Match:
        """See `find`. best: see `_best`, for each row."""
        prompts = [prompt for prompt, _ in best if prompt is not None]
        common = min(match for _, match in best)
        if len(prompts) < len(rows):
            return self._missed(common, known)
        ends = {len(prompt.ids) for prompt in prompts}
        matches = [min(match, len(ids) - 1) for (_, match), ids in zip(best, rows, strict=True)]
        tokens = min(matches)
        if len(ends) > 1 or any(prompt.restorable(tokens) < tokens for prompt in prompts):
            tokens = min(prompt.whole_pages(match) for prompt, match in zip(prompts, matches, strict=True))
        if tokens <= known:
            return self._missed(common, known)
        for prompt in prompts:
            self._touch(prompt)
        self.hits += 1
        self.tokens_saved += tokens * len(rows)
        return Match(tokens, common, joined(prompts, tokens))

    def _missed(self, common: int, known: int = 0) -> Match:
        self.misses += not known
        return Match(0, common)

    @torch.no_grad()
    def add(self, cache: LowBitCache, rows: list[torch.Tensor], key: Key | None = None) -> None:
        """Keep the contents of a cache.

        Args:
            rows: ids int64 `[n]` of each row, on the CPU, without padding. A row is left out if the cache holds another
                number of its tokens.
            key: as for `find`.
        """
        layers = cache.packed_layers
        if layers[0].store is None:
            return
        lengths = layers[0].store.state.length[:, 0].tolist()
        with self._lock:
            read = None if cache.read_lengths is None else cache.read_lengths.whole(cache)
            if cache.read_lengths is not None and (read is None or not cache.read_lengths.rope.settled(read)):
                return  # no text that is read whole has these keys
            key = key or self.key_of(cache, read or 0)
            for row, ids in enumerate(rows):
                if len(ids) == lengths[row] and len(ids) > 0:
                    self._add(cache, row, ids.to(torch.int64, copy=True), key)
            self._make_room()

    def _add(self, cache: LowBitCache, row: int, ids: torch.Tensor, key: Key) -> None:
        model = cache.model.get("kept")
        alike = {prompt: prompt.matches(ids) for prompt in self._alike(key.digest, model)}
        for prompt, match in alike.items():
            if match == len(ids) and (match == len(prompt.ids) or not prompt.native_layers):
                self._touch(prompt)
                return  # it is stored already, or part of a stored text
        nearest = max(alike.items(), key=lambda each: each[0].full_pages(each[1]), default=())
        contents = cache_contents.take(cache, shared=True, row=row)
        header = {**key.header, "embedded": rows_digest(model, ids)}
        new = contents.copied(*nearest).keep(key.digest, ids, header)
        if new.nbytes > self.max_bytes:
            if self._folder is None and not self._warned_of_size:
                self._warned_of_size = True
                warnings.warn(
                    f"a text of {len(ids)} tokens takes {new.nbytes} bytes and is not kept: max_bytes={self.max_bytes} "
                    "is too small for it. Give PrefixStore a larger max_bytes=, or a folder=",
                    stacklevel=2,
                )
            self._move_to_folder(new)
            return
        self._prompts.append(new)
        for prompt, match in alike.items():
            if match == len(prompt.ids) and not prompt.native_layers:  # the new text continues it
                self._remove(prompt)

    # ---- in detail ------------------------------------------------------------------------------------------------

    def key_of(self, cache: LowBitCache, read: int) -> Key:
        """The key of texts that this cache's model reads now. Waits for the device.

        Args:
            read: tokens of the text that is read; some models' rotary embeddings depend on it.
        """
        model = cache.model.get("looked up")
        fingerprint = fingerprint_of(model, "prefixes=")
        rope = length_rope(model)
        identity: dict[str, Any] = {"model": fingerprint_digest(fingerprint), "layers": cache_contents.kind_of(cache)}
        identity |= {} if rope is None else {"rope": rope.beyond(read)}
        return Key(fingerprint_digest(identity), saved_cache.header_of(cache, fingerprint))

    def _alike(self, seed: str, model: Any) -> list[Contents]:
        return [x for x in self._prompts if x.seed == seed and x.device == model.device and x.suits(model)]

    def _load_longer(self, seed: str, model: Any, ids: torch.Tensor, known: int) -> bool:
        """Load the text of the folder that has most tokens in common with this one, if those on the device have fewer. Returns
        whether there is one."""
        if self._folder is None:
            return False
        on_device = max([known, *(prompt.matches(ids) for prompt in self._alike(seed, model))])
        loaded = self._folder.load(seed, ids, model.device, on_device, model)
        self._prompts += [] if loaded is None else [loaded]
        return loaded is not None

    def _best(self, seed: str, model: Any, ids: torch.Tensor) -> tuple[Contents | None, int]:
        """The text from which most tokens can be restored, and the length of the common prefix."""
        best: Contents | None = None
        most, longest = 0, 0
        for prompt in self._alike(seed, model):
            match = prompt.matches(ids)
            longest = max(longest, match)
            if (gain := prompt.restorable(min(match, len(ids) - 1))) > most:
                best, most = prompt, gain
        return best, longest if best is None else best.matches(ids)

    def _touch(self, prompt: Contents) -> None:
        self._prompts.remove(prompt)
        self._prompts.append(prompt)

    def _make_room(self) -> None:
        """Remove the oldest texts beyond the limit. First those that are larger than the limit, which a folder had."""
        while self._prompts and self.nbytes > self.max_bytes:
            oldest = min(self._prompts, key=lambda prompt: prompt.nbytes <= self.max_bytes)
            self._move_to_folder(oldest)
            self._remove(oldest)

    def _move_to_folder(self, prompt: Contents) -> None:
        """Write a text that is not kept on the device, if there is a folder."""
        self.removed += 1
        if (folder := self._folder) is None:
            return
        try:
            folder.save(prompt)
        except OSError as error:  # the caller's text is not lost for that
            warnings.warn(
                f"a text of {len(prompt.ids)} tokens is dropped, because folder={str(folder.path)!r} does not "
                f"take it: {error}",
                stacklevel=2,
            )

    def _remove(self, prompt: Contents) -> None:
        """Remove a text, and free the pages that only it used."""
        self._prompts.remove(prompt)
        for slab in prompt.acquired:
            trim(self._prompts, slab)
