"""A text of numbers and its tokenizer."""

import torch

from hf_lowbit_kv.eval.texts import Text


class Numbers:
    """A tokenizer of one token a word."""

    def __call__(self, text: str, **kwargs):
        self.input_ids = torch.tensor([[int(word) % 160 for word in text.split()]])
        return self


TEXT = Text("numbers", " ".join(str(i * i % 101 + i % 7) for i in range(700)))
