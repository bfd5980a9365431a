"""Tokenizers without a vocabulary to read: tokens are numbers, with a text of them, or letters."""

from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_lowbit_kv.eval.texts import Text

TEXT = Text("numbers", " ".join(str(i * i % 101 + i % 7) for i in range(700)))
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if extra %}{{ extra }}{% endif %}"


class Numbers:
    """A tokenizer of one token a number."""

    def __call__(self, text: str, **kwargs):
        self.input_ids = torch.tensor([[int(word) % 160 for word in text.split()]])
        return self


def characters(text: str, **options):
    """A tokenizer of one token a character: 3 to 152."""
    return SimpleNamespace(input_ids=torch.tensor([[3 + ord(character) % 150 for character in text]]))


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of one token a letter. Token `i` below 160 is the character `chr(i)`, as far as that can be shown; a space
    is token 32."""
    shown = {chr(number): number for number in range(33, 127)}
    others = {f"<{number}>": number for number in (*range(32), *range(127, 160))}
    tokenizer = Tokenizer(models.BPE(vocab=shown | others | {"\u0120": 32}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
