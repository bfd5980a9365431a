"""Conversations as clients send them: what the model reads of them, and what comes back."""

import json

import pytest
import torch
from chat_families import FAMILIES, tokenizer_of_bytes
from served_here import Here
from transformers import LogitsProcessor, Qwen2Config, Qwen2ForCausalLM

FAMILY = FAMILIES["qwen2.5"]
#: shows messages as the template gets them
AS_DATA = "{{ messages | tojson }}<|im_start|>assistant"


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("conversations"), tokenizer_of_bytes(FAMILY)
    torch.manual_seed(0)
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1}
    Qwen2ForCausalLM(Qwen2Config(**tokens, **heads, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    server = Here(folder, share_prefixes=True)
    yield server
    server.close()


class Script(LogitsProcessor):
    """The model writes these ids."""

    def __init__(self, ids):
        self.ids = list(ids)

    def __call__(self, input_ids, scores):
        out = torch.full_like(scores, -1e9)
        out[:, self.ids.pop(0)] = 0
        return out


class Scripted:
    """A server whose model writes `text`. `requests` are those that were submitted."""

    def __init__(self, here, monkeypatch):
        self.here, self.submit, self.requests, self.text = here, here.loop.submit, [], "Hello!"
        self.tokenizer = here.models.load_model_and_processor(here.models.process_model_name(here.models.force_model))[
            1
        ]
        monkeypatch.setattr(here.loop, "submit", self.scripted)

    def scripted(self, options, done):
        self.requests.append(options)
        ids = [*self.tokenizer.encode(self.text, add_special_tokens=False), self.tokenizer.eos_token_id]
        return self.submit({**options, "logits_processor": [Script(ids)]}, done)

    def ask(self, messages, **options):
        """The answer as a message that a client sends back, and its usage."""
        status, answer = self.here.ask({"messages": messages, **options})
        assert status == 200, answer
        if not isinstance(answer, list):
            return answer["choices"][0]["message"], answer["usage"]
        deltas = [event["choices"][0]["delta"] for event in answer]
        message = {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}
        if calls := [call for delta in deltas for call in delta.get("tool_calls") or []]:
            message["tool_calls"] = calls
        return message, answer[-1]["usage"]


@pytest.fixture
def scripted(here, monkeypatch):
    return Scripted(here, monkeypatch)


@pytest.mark.parametrize("streamed", [False, True])
def test_three_turns_with_a_tool_call(scripted, streamed):
    """With the template of Qwen2.5: each prompt is what the template makes of the messages."""
    sent, read, usages = [], [], []
    for asked, written, shown, fields in FAMILY.turns:
        new = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        sent, read, scripted.text = [*sent, *new], [*read, *new], written
        message, usage = scripted.ask(sent, stream=streamed, temperature=0, **FAMILY.options)
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **FAMILY.options}
        prompt = scripted.tokenizer.apply_chat_template(read, **options)["input_ids"]
        assert scripted.requests[-1]["input_ids"] == prompt
        assert usage["prompt_tokens"] == len(prompt)
        calls = [call["function"] for call in message.get("tool_calls") or []]
        wanted = [call["function"] for call in fields.get("tool_calls", [])]
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
            (call["name"], call["arguments"]) for call in wanted
        ]
        assert message["content"] == shown
        sent, read = [*sent, message], [*read, {"role": "assistant", **fields}]
        usages.append(usage)
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert 0 < cached[1] <= cached[2] < usages[2]["prompt_tokens"]


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": " \n"}], ids=str)
def test_the_template_gets_all_fields(scripted, monkeypatch, arguments):
    """But none that is null. Calls without arguments have none, as clients write it."""
    monkeypatch.setattr(scripted.tokenizer, "chat_template", AS_DATA)
    call = {"id": "a", "type": "function", "function": {"name": "now", **arguments}}
    other = {"id": "b", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    parts = [{"type": "text", "text": "It is"}, {"type": "text", "text": "noon"}]
    scripted.ask(
        [
            {"role": "user", "content": "Time?", "name": "Ann", "refusal": None},
            {"role": "assistant", "content": "I ask", "reasoning_content": "Hm", "tool_calls": [call, other]},
            {"role": "tool", "content": parts, "tool_call_id": "a"},
            {"role": "assistant", "content": None, "tool_calls": None},
        ]
    )
    text = scripted.tokenizer.decode(scripted.requests[0]["input_ids"])
    user, asks, result, empty = json.loads(text.split("<|im_start|>")[0])
    assert user == {"role": "user", "content": "Time?", "name": "Ann"}
    functions = [{"name": "now", "arguments": {}}, {"name": "f", "arguments": {"x": [1]}}]
    assert [each.pop("function") for each in asks.pop("tool_calls")] == functions
    asks.pop("thinking", None)  # another name of it, from transformers
    assert asks == {"role": "assistant", "content": "I ask", "reasoning_content": "Hm"}
    assert result == {"role": "tool", "content": "It is noon", "tool_call_id": "a"}
    assert empty == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("arguments", ["{", '{"a": "\\ud800"}', "5" * 5000], ids=["{", "surrogate", "long"])
def test_arguments_that_cannot_be_read(scripted, arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    status, answer = scripted.here.ask({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert status == 400, answer


def test_fields_that_are_off(scripted):
    """At the values that clients send for it."""
    messages = [{"role": "user", "content": "Hi"}]
    off = {"max_tokens": -1, "max_completion_tokens": None, "seed": -1, "top_logprobs": 0}
    answers = [scripted.ask(messages, **each)[0] for each in ({}, {"top_k": 0, **off}, {"top_k": -1, **off})]
    assert answers == [{"role": "assistant", "content": "Hello!"}] * 3
    plain, *others = [request["generation_config"] for request in scripted.requests]
    for config in others:
        assert (config.max_new_tokens, bool(config.do_sample), config.top_k) == (plain.max_new_tokens, False, 0)
    assert not any("seed" in request for request in scripted.requests)
