"""Stop strings in text that is decoded token by token."""

import random

import pytest
import torch
from tiny_tokenizers import letters
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast, StopStringCriteria

from hf_lowbit_kv.generation.stop_strings import StopStrings


def tokenizer_with_end():
    """A tokenizer of letters, and a special token."""
    tokenizer = letters()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    return tokenizer


def passed_on(tokenizer, text, stops, **options):
    """What is passed on of a text, whether a stop string came, and how many tokens were read."""
    found, out, tokens = StopStrings(tokenizer, stops, **options), "", 0
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        out, tokens = out + found.add(token), tokens + 1
        if found.reached:
            break
    return out + found.end(), found.reached, tokens


@pytest.mark.parametrize("tokenizer", [tokenizer_with_end(), ByT5Tokenizer()], ids=["fast", "slow"])
def test_text_before_a_stop_string_is_passed_on(tokenizer):
    stops = ["<end>", "xyz"]
    assert passed_on(tokenizer, "ab<en<end>cd<end>", stops) == ("ab<en", True, 10)
    assert passed_on(tokenizer, "ab<en", stops) == ("ab<en", False, 5)
    assert passed_on(tokenizer, "ab<en", []) == ("ab<en", False, 5)
    assert passed_on(tokenizer, "abxc", "x") == ("ab", True, 3)


def test_special_tokens():
    """They are stop strings, or parts of these. Text that is not shown ends texts too."""
    tokenizer = tokenizer_with_end()
    hidden = {"unshown": {tokenizer.convert_tokens_to_ids("<|end|>")}}
    for stops in ("<|end|>", "b<|end|>"):
        assert passed_on(tokenizer, "ab<|end|>c", stops)[1:] == (True, 3)
    assert passed_on(tokenizer, "ab<|end|>c<|end|>|", ["none"]) == ("ab<|end|>c<|end|>|", False, 6)
    assert passed_on(tokenizer, "ab<|end|>c<|end|>|", ["none", "|>||"], **hidden) == ("abc|", False, 6)
    assert passed_on(tokenizer, "ab<|end|>c", "b<|end|>c", **hidden) == ("a", True, 4)


@pytest.mark.parametrize(
    "stops", [["<|end|>"], ["ab<|end|>"], ["aba"], ["|>a"], ["b" * 9], ["b", "ba<|end|>"], ["<|end|>", "|>bb"]]
)
def test_texts_end_where_transformers_ends_them(stops):
    """In random texts, also if the stop string begins in the prompt or is in it."""
    tokenizer, rng = tokenizer_with_end(), random.Random(0)
    tokens = tokenizer("ab<|end|>")["input_ids"]
    criterion, ends = StopStringCriteria(tokenizer, stops), set()
    for _ in range(40):
        ids, prompt = rng.choices(tokens, k=30), rng.randrange(1, 6)
        found = StopStrings(tokenizer, stops, prompt_ids=ids[:prompt])
        for end in range(prompt, 30):
            found.add(ids[end])
            assert found.reached == bool(criterion(torch.tensor([ids[: end + 1]]), None))
            if found.reached:
                ends.add(end)
                break
    assert len(ends) > 3 or stops == ["b" * 9]


def test_a_token_that_ends_a_stop_string_and_begins_a_character():
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "\u0120\u00f0"]  # a space and the first byte of an emoji
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [("\u0120", "\u00f0")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer, text = PreTrainedTokenizerFast(tokenizer_object=backend), "a \U0001f600b"
    assert passed_on(tokenizer, text, " ") == ("a", True, 2)
    assert StopStringCriteria(tokenizer, [" "])(torch.tensor([tokenizer(text)["input_ids"][:2]]), None)
    assert passed_on(tokenizer, text, "b") == (text[:-1], True, 6)
