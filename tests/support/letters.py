"""A tokenizer whose tokens are letters."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if extra %}{{ extra }}{% endif %}"


def letters() -> PreTrainedTokenizerFast:
    """Token `i` below 160 is the character `chr(i)`, as far as that can be shown; a space is token 32."""
    shown = {chr(number): number for number in range(33, 127)}
    others = {f"<{number}>": number for number in (*range(32), *range(127, 160))}
    tokenizer = Tokenizer(models.BPE(vocab=shown | others | {"\u0120": 32}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
