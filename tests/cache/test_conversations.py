"""Random conversations of a batch on one `dense` cache: it gives the logits of a fresh reading of the whole text in
transformers' own attention, or refuses as documented. `CONVERSATIONS=n` runs n of them.

Turns are ragged, end early in some rows, and hide what they like; between turns rows are cropped, forked, reordered, saved and
restored, and the model gets another LoRA adapter. What a cache refuses by its documentation is tried too, and must change
nothing.
"""

import copy
import functools
import os
import random
from pathlib import Path

import mla_cases
import peft
import pytest
import torch
from cases import tiny_models

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.native_layers import can_crop

#: of all families together; they take some 20 seconds of a CPU
COUNT = int(os.environ.get("CONVERSATIONS") or 36)
#: tiny architectures
FAMILIES = [
    *("llama", "qwen3", "phi3", "mixtral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "lfm2"),
    *("gemma4_text", "mimo_v2_flash"),
]
#: their states have read every token, so nothing is padded and nothing can be hidden
RECURRENT = ("qwen3_next", "lfm2")
#: tokens of a row, and what a preallocated cache has room for
MOST_TOKENS = 420
TURNS = 5
#: logits may differ by this
CLOSE = {"rtol": 2e-3, "atol": 5e-3}
OTHER_MODEL = "filled by a different model"
#: linear layers that get adapters: those of attention and of recurrent layers
ADAPTED = [
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("in_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
]


@functools.cache
def models(family: str):
    """Ours and transformers', with the same weights."""
    if family == "deepseek_v3":
        return mla_cases.tiny_models(family, num_hidden_layers=2, **mla_cases.DENSE_MLP)
    return tiny_models(family)


@functools.cache
def adapted_models(family: str):
    """Copies of both with the LoRA adapters `one` and `two`, the same in both."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=ADAPTED, init_lora_weights=False)
    both = [peft.get_peft_model(copy.deepcopy(model), config, "one").eval() for model in models(family)]
    for model in both:
        model.add_adapter("two", config)
    both[1].load_state_dict(both[0].state_dict())
    return both


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


class Conversation:
    """One conversation. What it has checked is in `tokens`, `ties` and `refusals`.

    Args:
        seed: of everything that is drawn. folder: for saved caches.
    """

    def __init__(self, family: str, seed: str, folder: Path):
        self.family, self.folder, self.draw = family, folder, random.Random(seed)
        self.gen = torch.Generator().manual_seed(self.draw.getrandbits(60))
        self.adapted = adapted_models(family) if self.draw.random() < 0.5 else None
        self.ours, self.theirs = [x.base_model.model for x in self.adapted] if self.adapted else models(family)
        #: the adapter that is active, and the one under which the cache was filled
        self.adapter = self.filled_under = None
        if self.adapted:
            self.use("one")
        self.rows = self.draw.randint(1, 4)
        self.ids = torch.zeros(self.rows, 0, dtype=torch.long)
        self.mask = torch.zeros(self.rows, 0, dtype=torch.long)
        self.cache = lb.from_preset(
            "dense",
            self.ours,
            page_size=32,
            residual=self.draw.choice((32, 32, 40, 0)),
            sink=self.draw.choice((0, 4, 32)),
            max_cache_len=self.draw.choice((None, MOST_TOKENS)),
        )
        self.left: tuple | None = None
        self.tokens = self.ties = self.refusals = 0

    @property
    def seen(self) -> int:
        return int(self.cache.get_seq_length())

    @property
    def preallocated(self) -> bool:
        return self.cache.packed_layers[0].length.fixed

    def run(self) -> None:
        for turn in range(TURNS):
            if turn:
                for _ in range(self.draw.randint(0, 2)):
                    getattr(self, self.draw.choice(BETWEEN))()
            self.turn()
        if self.left is not None:
            self.ids, self.mask, self.cache, self.filled_under = self.left
            self.turn()

    # ---- a turn ---------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """The newest tokens of some rows are hidden, new ones are read, and an answer is written."""
        answer = self.draw.choice((1, 2, 9, 40))
        new = min(self.draw.choice((2, 5, 20, 60, 110)), MOST_TOKENS - self.ids.shape[1] - answer)
        if new < 2:
            return
        self.hide()
        self.ids = torch.cat([self.ids, torch.randint(3, 160, (self.rows, new), generator=self.gen)], 1)
        self.mask = torch.cat([self.mask, self.new_columns(new)], 1)
        self.go_on_or_start_again()
        self.try_bad_masks()
        ways = [self.passes, self.generate, *([self.lb_generate] if self.preallocated else [])]
        logits = self.draw.choice(ways)(answer)
        self.compare(logits)

    def new_columns(self, new: int) -> torch.Tensor:
        """Mask of `new` columns: padded on the left, with holes, or whole. All rows end with a token."""
        column, kind = torch.arange(new), self.draw.choice(("left", "holes", "whole"))
        if self.family in RECURRENT or kind == "whole":
            return torch.ones(self.rows, new, dtype=torch.long)
        if kind == "left":
            padded = torch.tensor([[self.draw.randint(0, new - 1)] for _ in range(self.rows)])
            return (column >= padded).long()
        real = torch.rand(self.rows, new, generator=self.gen) < 0.7
        return (real | (column == new - 1)).long()

    def hide(self) -> None:
        """The mask hides the newest tokens of rows, as after a turn that ended early."""
        if self.family in RECURRENT or not self.seen or self.draw.random() < 0.4:
            return
        counts = torch.tensor([[self.draw.choice((0, 1, 4, 30, 70))] for _ in range(self.rows)])
        self.mask = self.mask * (self.mask.flip(1).cumsum(1).flip(1) > counts)

    def try_bad_masks(self) -> None:
        """What the cache refuses: a hole in stored tokens, or padding that is shown."""
        stored = self.stored()
        if stored is None or self.draw.random() < 0.4:
            return
        row, seen = self.draw.randrange(self.rows), self.seen
        real, padded = (x.nonzero()[:, 0].tolist() for x in (stored[row], ~stored[row]))
        bad = self.mask.clone()
        if padded and self.draw.random() < 0.5:
            column, message = self.draw.choice(padded), "shows column"
            bad[:, :seen] = stored.long()
            bad[row, column] = 1
        elif len(real) > 1:
            column = self.draw.choice(real[:-1])
            message = "hides column"
            bad[:, :seen] = stored.long()
            bad[row, column] = 0
        else:
            return
        with pytest.raises(ValueError, match=f"attention_mask {message} {column} of row {row}, which is"):
            self.read(self.ids.shape[1], bad)
        self.refusals += 1
        assert self.seen == seen

    def go_on_or_start_again(self) -> None:
        """A cache that another adapter filled refuses. The model gets that adapter again, or the text is read again."""
        if self.seen and self.adapter != self.filled_under:
            seen = self.seen
            with pytest.raises(ValueError, match=OTHER_MODEL):
                self.read(self.ids.shape[1])
            self.refusals += 1
            assert self.seen == seen
            if self.draw.random() < 0.5:
                self.use(self.filled_under)
            else:
                self.cache.reset()
        self.filled_under = self.adapter

    def stored(self) -> torch.Tensor | None:
        """bool `[B, seen]`: which positions are stored, as the cache knows it; `None`: nothing is."""
        if not (seen := self.seen):
            return None
        found = self.cache.packed_layers[0].stored_positions()
        return torch.ones(self.rows, seen, dtype=torch.bool) if found is None else found

    def read(self, end: int, mask: torch.Tensor | None = None) -> torch.Tensor:
        """One pass over the columns up to `end` that are not stored. Returns their logits."""
        mask = self.mask[:, :end] if mask is None else mask
        chunk = slice(self.seen, end)
        with torch.no_grad():
            return self.ours(
                self.ids[:, chunk],
                attention_mask=mask,
                position_ids=positions_of(mask)[:, chunk],
                **as_argument(self.cache),
            ).logits

    def write(self, token: torch.Tensor) -> None:
        self.ids = torch.cat([self.ids, token], 1)
        self.mask = torch.cat([self.mask, torch.ones_like(token)], 1)

    def passes(self, answer: int) -> torch.Tensor:
        """The new tokens are read in one to three chunks, the answer token by token. Logits of all of them."""
        end, logits = self.ids.shape[1], []
        first = self.draw.randint(self.seen + 2, end)  # the mask of one token is not compared
        for stop in sorted({first, self.draw.randint(first, end), end}):
            logits.append(self.read(stop))
        for _ in range(answer):
            self.write(logits[-1][:, -1:].argmax(-1))
            logits.append(self.read(self.ids.shape[1]))
        return torch.cat(logits, 1)

    def generate(self, answer: int) -> torch.Tensor:
        return self._generate(self.ours.generate, answer)

    def lb_generate(self, answer: int) -> torch.Tensor:
        return self._generate(functools.partial(lb.generate, self.ours), answer)

    def _generate(self, generate, answer: int) -> torch.Tensor:
        """The answer in one call. Its logits; the newest token is not stored."""
        out = generate(
            inputs=self.ids,
            attention_mask=self.mask,
            max_new_tokens=answer,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            **as_argument(self.cache),
        )
        for token in out.sequences[:, self.ids.shape[1] :].split(1, 1):
            self.write(token)
        return torch.stack(out.logits, 1)

    def compare(self, logits: torch.Tensor) -> None:
        """Logits of the last positions read, token by token, with those of a fresh reading."""
        end = self.seen
        ids, mask = self.ids[:, :end], self.mask[:, :end]
        with torch.no_grad():
            fresh = self.theirs(ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=False).logits
        real = mask[:, -logits.shape[1] :].bool()
        got, want = logits[real], fresh[:, -logits.shape[1] :][real]
        torch.testing.assert_close(got, want, **CLOSE)
        self.tokens += len(got)
        self.ties += int((got.argmax(-1) != want.argmax(-1)).sum())

    # ---- between turns --------------------------------------------------------------------------------------------

    def crop(self) -> None:
        count, seen = self.draw.choice((1, 3, 20, 70)), self.seen
        if count >= seen:
            return
        if not all(can_crop(layer) for layer in self.cache.layers):
            with pytest.raises(ValueError, match="is not possible: layer"):
                self.cache.crop(-count)
            self.refusals += 1
            return
        self.cache.crop(-count)
        self.ids, self.mask = self.ids[:, : seen - count], self.mask[:, : seen - count]

    def fork(self) -> None:
        """One of the two continues; the other has one more turn at the end."""
        new = self.cache.fork()[0]
        self.cache, other = (self.cache, new) if self.draw.random() < 0.5 else (new, self.cache)
        if self.left is None:
            self.left = self.ids, self.mask, other, self.filled_under

    def reopen(self) -> None:
        if self.seen and self.adapter != self.filled_under:
            with pytest.raises(ValueError, match=OTHER_MODEL):
                self.cache.save_pretrained(self.folder)
            self.refusals += 1
            return
        self.cache.save_pretrained(self.folder)
        capacity = self.draw.choice((None, MOST_TOKENS))
        self.cache = lb.LowBitCache.from_pretrained(self.folder, self.ours, max_cache_len=capacity)

    def reorder(self) -> None:
        rows = torch.tensor([self.draw.randrange(self.rows) for _ in range(self.rows)])
        self.cache.reorder_cache(rows)
        self.ids, self.mask = self.ids[rows], self.mask[rows]

    def switch_adapter(self) -> None:
        if self.adapted:
            self.use("two" if self.adapter == "one" else "one")

    def use(self, adapter: str) -> None:
        for model in self.adapted:
            model.set_adapter(adapter)
        self.adapter = adapter


#: names of methods that change the cache between turns
BETWEEN = ("crop", "fork", "reopen", "reorder", "switch_adapter")


@pytest.mark.host
@pytest.mark.timeout(0 if "CONVERSATIONS" in os.environ else 600)
@pytest.mark.parametrize(
    "family",
    [
        family if family in ("llama", "gemma2", "qwen3_next") else pytest.param(family, marks=pytest.mark.newest)
        for family in FAMILIES
    ],
)
def test_any_conversation(family, tmp_path, one_thread):
    tokens = ties = refusals = 0
    for number in range(FAMILIES.index(family), COUNT, len(FAMILIES)):
        conversation = Conversation(family, f"{os.environ['TEST_SEED']} {number}", tmp_path)
        try:
            conversation.run()
        except Exception as error:
            error.add_note(f"conversation {number}")
            raise
        tokens, ties = tokens + conversation.tokens, ties + conversation.ties
        refusals += conversation.refusals
    print(f"{family}: {tokens} tokens, {ties} near-ties, {refusals} refusals")
    assert tokens > 0
    assert ties <= tokens / 200
