"""Chats and `generate_many` with templates of the families that people use: what is shown, what the next turn reads."""

import warnings
from datetime import datetime

import pytest
import torch
from chat_families import FAMILIES, RESULT, tokenizer_of_bytes
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import hf_lowbit_kv as lb

pytestmark = [pytest.mark.host, pytest.mark.filterwarnings("ignore:this model has no response template")]


class Script(LogitsProcessor):
    """The model writes these ids."""

    def __init__(self, ids):
        self.ids, self.begin = ids, None

    def __call__(self, input_ids, scores):
        self.begin = input_ids.shape[1] if self.begin is None else self.begin
        out = torch.full_like(scores, -1e9)
        out[:, self.ids[min(input_ids.shape[1] - self.begin, len(self.ids) - 1)]] = 0
        return out


def _model(tokenizer, qwen):
    torch.manual_seed(0)
    kind, config = (Qwen2ForCausalLM, Qwen2Config) if qwen else (LlamaForCausalLM, LlamaConfig)
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 4096}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return kind(config(**sizes, **heads, **tokens)).eval()


def _begun(family):
    tokenizer = tokenizer_of_bytes(family)
    model = _model(tokenizer, family.qwen)
    options = {"max_length": 3000, "chat_template_kwargs": family.options, "do_sample": False}
    return lb.Chat(model, tokenizer, "dense", system=family.system, **options)


def _template_ids(chat, family, messages):
    """What transformers makes of these messages."""
    if family.parts:
        messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **family.options}
    return list(chat.tokenizer.apply_chat_template(messages, **options)["input_ids"])


@pytest.mark.parametrize("name", FAMILIES)
def test_three_turns(name):
    family = FAMILIES[name]
    chat = _begun(family)
    for number, (text, written, shown, fields) in enumerate(family.turns):
        new = (
            [{"role": "user", "content": text}] if isinstance(text, str) else text if isinstance(text, list) else [text]
        )
        asked, ids = [*chat.messages, *new], chat.tokenizer.encode(written, add_special_tokens=False)
        ids.append(chat.tokenizer.eos_token_id)
        prompt = _template_ids(chat, family, asked)
        request = {"messages": asked, "logits_processor": [Script(ids)], "chat_template_kwargs": family.options}
        result = lb.generate_many(
            chat.model, [request], "dense", tokenizer=chat.tokenizer, max_new_tokens=300, progress=False
        )[0]
        assert (result.error, result.prompt_ids, result.text) == (None, prompt, shown)
        chat.options["logits_processor"] = [Script(ids)]
        answer = "".join(chat.stream(text)) if number % 2 else chat.send(text)
        assert answer == shown
        message = dict(chat.messages[-1])
        assert message == result.message
        if "thinking" not in fields:  # of the server's template in transformers 5.17
            message.pop("thinking", None)
        assert message == {"role": "assistant", **fields}
        assert chat.messages[:-1] == asked
        assert chat.cache.text[0].tolist() == [*prompt, *ids[:-1]]
    del chat.options["logits_processor"]
    chat.options["max_new_tokens"] = 12
    ids = torch.tensor([_template_ids(chat, family, [*chat.messages, {"role": "user", "content": "Bye"}])])
    want = chat.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0].tolist()
    chat.send("Bye")
    held = chat.cache.text[0].tolist()
    assert held == want[: len(held)]
    assert len(held) >= len(want) - 1


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.2"])  # with and without a response template
def test_an_answer_that_goes_on_with_a_message_is_one_message(name):
    family = FAMILIES[name]
    chat = _begun(family)
    new = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure, here"}]
    asked, whole = [*chat.messages, *new], {"role": "assistant", "content": "Sure, here it is."}
    going_on = {**family.options, "continue_final_message": True}
    ids = [*chat.tokenizer.encode(" it is.", add_special_tokens=False), chat.tokenizer.eos_token_id]
    request = {"messages": asked, "logits_processor": [Script(ids)], "chat_template_kwargs": going_on}
    result = lb.generate_many(
        chat.model, [request], "dense", tokenizer=chat.tokenizer, max_new_tokens=9, progress=False
    )[0]
    assert (result.text, result.message) == (" it is.", whole)
    for way in (chat.send, lambda text: "".join(chat.stream(text))):
        chat.messages, chat.chat_template_kwargs = asked[: -len(new)], going_on
        chat.options["logits_processor"] = [Script(ids)]
        assert way(new) == " it is."
        assert chat.messages == [*asked[:-1], whole]


def test_streamed_lines_keep_the_spaces_that_they_begin_with():
    """Tokenizers like that of Llama 2 strip a space that begins a text."""
    vocabulary = {token: index for index, token in enumerate(("<s>", "</s>", *"▁\n:(){}abcdefghijklmnopqrstuvwxyz"))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    chat = lb.Chat(_model(tokenizer, qwen=False), tokenizer, "dense", max_length=300, do_sample=False)
    code = "def f():\n  for a in b:\n    print(a)\n\n  return {}\n"
    chat.options["logits_processor"] = [Script([*tokenizer.encode(code), tokenizer.eos_token_id])]
    assert "".join(chat.stream("code")) == code


def test_the_end_of_thinking_is_read_again_and_nothing_else():
    """Templates drop the reasoning of earlier turns. What precedes it stays in the cache."""
    family = FAMILIES["qwen3"]
    chat = _begun(family)
    text, written, _, _ = family.turns[0]
    chat.options["logits_processor"] = [Script([*chat.tokenizer.encode(written), chat.tokenizer.eos_token_id])]
    chat.send(text)
    prompt = _template_ids(chat, family, chat.messages[:1])
    read = []
    hook = chat.model.model.embed_tokens.register_forward_pre_hook(lambda module, args: read.append(args[0].shape[1]))
    chat.options["max_new_tokens"] = 1
    chat.send("Why?")
    hook.remove()
    assert sum(read) == len(_template_ids(chat, family, chat.messages[:3])) - len(prompt)


def test_a_chat_keeps_its_date(tmp_path):
    """The next day, after `load`. A chat that was saved without one has today's."""
    family = FAMILIES["llama3.2"]
    chat = _begun(family)
    chat.options["max_new_tokens"] = 2
    chat.date = datetime(2020, 2, 3)
    chat.send("Hi")
    chat.save(tmp_path)
    again = lb.Chat.load(tmp_path, chat.model, chat.tokenizer)
    assert "Today Date: 03 Feb 2020\n\n" in chat.tokenizer.decode(again._begin("Why?").ids[0])
    fixed = lb.Chat.load(tmp_path, chat.model, chat.tokenizer, chat_template_kwargs={"date_string": "1 May 2021"})
    assert "Today Date: 1 May 2021\n\n" in chat.tokenizer.decode(fixed._begin("Why?").ids[0])
    today = [{"role": "user", "content": "Hi"}]
    assert "2020" not in chat.tokenizer.apply_chat_template(today, tokenize=False)


@pytest.mark.parametrize("name", ["llava", "llama3.2"])
def test_parts(name):
    """Lists of text parts are taken by every template; other parts are refused by name before anything is read."""
    chat = _begun(FAMILIES[name])
    parts = [{"type": "text", "text": "How"}, {"type": "text", "text": "many?"}]
    assert "How many?" in chat.tokenizer.decode(chat._begin(parts).ids[0])
    image = [{"type": "image", "url": "a.png"}, *parts]
    for send in (chat.send, lambda content: chat.send({"role": "tool", "content": content})):
        with pytest.raises(ValueError, match="has a part of type 'image', and only text is served"):
            send(image)
    with pytest.raises(ValueError, match="it must be a text or a list of"):  # which templates would skip
        chat.send({"role": "user", "content": ["How many?", *parts]})
    requests = [[{"role": "user", "content": content}] for content in (parts, image)]
    results = lb.generate_many(
        chat.model, requests, "dense", tokenizer=chat.tokenizer, max_new_tokens=1, progress=False
    )
    assert "How many?" in chat.tokenizer.decode(results[0].prompt_ids)
    assert "part of type 'image'" in results[1].error


def test_one_warning_names_the_missing_response_template():
    chat = _begun(FAMILIES["gpt-oss, not parsed"])
    written = chat.tokenizer.encode("<|channel|>final<|message|>Yes.<|return|>")
    for caught in ([__file__], []):
        chat.options["logits_processor"] = [Script(written)]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            chat.send("Hi")
        assert [each.filename for each in warned if "no response template" in str(each.message)] == caught


def test_a_prompt_of_another_template_is_not_parsed():
    """transformers has a response template for all models of Qwen's types. A fine-tuned one may have another chat template,
    and its prompt would be a part of the answer."""
    family = FAMILIES["qwen2.5"]
    chat = _begun(family)
    chat.tokenizer.chat_template, chat.chat_template_kwargs = FAMILIES["gemma2"].template, {}
    chat.options["logits_processor"] = [Script([*chat.tokenizer.encode("Hello!"), chat.tokenizer.eos_token_id])]
    assert chat.send("Hi") == "Hello!" == chat.messages[-1]["content"]


def test_undo_of_a_turn_with_a_tool(tmp_path):
    family = FAMILIES["qwen2.5"]
    chat = _begun(family)
    for text, written, _, _ in family.turns:
        chat.options["logits_processor"] = [Script([*chat.tokenizer.encode(written), chat.tokenizer.eos_token_id])]
        chat.send(text)
    assert [message["role"] for message in chat.messages[2:]] == ["user", "assistant", "tool", "tool", "assistant"]
    del chat.options["logits_processor"]
    chat.save(tmp_path)
    assert lb.Chat.load(tmp_path, chat.model, chat.tokenizer).messages == chat.messages
    chat.undo()
    assert len(chat.messages) == 2
    chat.messages = tuple(chat.messages)
    chat.options["max_new_tokens"] = 1
    chat.send(RESULT)
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
