"""What the tests of chats share: a tokenizer of whole words with a chat template, and messages."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def tokenizer_of(template=PLAIN):
    known = ["<pad>", "<bos>", "<unk>", "<end>", "[user]", "[system]", "[assistant]"]
    known += [f"w{number}" for number in range(160 - len(known))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", unk_token="<unk>")
    made.chat_template = template
    return made


def words(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{number}" for number in torch.randint(0, 140, (count,), generator=generator).tolist())
