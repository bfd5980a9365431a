# ruff: noqa: E501 (templates are as their models have them)
"""Chat templates of the families that people use, shortened, and answers as these models write them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN2_5 = (Path(__file__).parents[1] / "data/chat_templates/qwen2.5.jinja").read_text()
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Lima"}}}


@dataclass
class Family:
    """A kind of template.

    Attributes:
        template: of the chat; `None`: the tokenizer writes messages itself.
        special: its special tokens, the first of which begins and the second of which ends texts.
        turns: the text that is sent, tokens that the model writes, the text that is shown, fields of the message.
        added: other tokens of the template that are not special.
        parts: whether the template reads content only as a list of parts.
    """

    template: str | None
    special: tuple[str, ...]
    turns: list[tuple[Any, str, str, dict[str, Any]]]
    options: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    response_template: dict | None = None
    qwen: bool = False
    added: tuple[str, ...] = ()
    parts: bool = False


def says(text):
    return {"content": text}


GPT_OSS_ANSWERS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+) <\|constrain\|>json<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|return|>", "<|end|>"], "content": "text"},
    },
}
GPT_OSS = """{%- macro date() -%}{{ strftime_now("%Y-%m-%d") }}{%- endmacro -%}
{{- "<|start|>system<|message|>Current date: " + date() + "\\n# Valid channels: analysis, commentary, final.<|end|>" }}
{%- for m in messages %}
  {%- if m.role == "assistant" %}
    {%- if "content" in m and "<|channel|>" in m.content %}{{ raise_exception("pass thinking as a field") }}{% endif %}
    {%- if "tool_calls" in m %}
      {%- if m.thinking %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" }}{% endif %}
      {%- set call = m.tool_calls[0].function %}
      {{- "<|start|>assistant<|channel|>commentary to=functions." + call.name + " <|constrain|>json<|message|>" }}
      {{- call.arguments | tojson + "<|call|>" }}
    {%- else %}
      {{- "<|start|>assistant<|channel|>final<|message|>" + m.content + "<|end|>" }}
    {%- endif %}
  {%- elif m.role == "tool" %}
    {{- "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>" + m.content + "<|end|>" }}
  {%- else %}
    {{- "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{% endif %}"""
GPT_OSS_TOKENS = (
    "<|startoftext|>",
    "<|return|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
)
QWEN3 = """{%- set last = namespace(user=0) %}
{%- for m in messages if m.role == "user" %}{% set last.user = loop.index0 %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == "assistant" %}
        {%- set content = m.content.split("</think>")[-1].lstrip("\\n") if m.content else "" %}
        {{- "<|im_start|>assistant\\n" }}
        {%- if m.reasoning_content and loop.last %}{{- "<think>\\n" + m.reasoning_content + "\\n</think>\\n\\n" }}{% endif %}
        {{- content + "<|im_end|>\\n" }}
    {%- else %}
        {{- "<|im_start|>" + m.role + "\\n" + m.content + "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- "<think>\\n\\n</think>\\n\\n" }}{% endif %}
{%- endif %}"""
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' and m['content'] is not none %}{% set content = m['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% else %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}{% for content in message['content'] "
    "| selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST]' + message['content'] + '[/INST]' }}"
    "{% elif message['role'] == 'tool' %}{{ '[TOOL_RESULTS]' + message['content'] + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_CALL = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Lima"}}]'
PLAIN_TURNS = [
    ("Hi", "Hello!", "Hello!", says("Hello!")),
    ("Say no", "No.", "No.", says("No.")),
    ("Why?", " So. ", " So. ", says(" So. ")),
]
RESULT = {"role": "tool", "content": "22 degrees"}

FAMILIES = {
    "gpt-oss": Family(
        GPT_OSS,
        GPT_OSS_TOKENS,
        [
            (
                "Hi",
                "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello!",
                "Hello!",
                {"thinking": "A greeting.", "reasoning_content": "A greeting.", "content": "Hello!"},
            ),
            (
                "Weather?",
                "<|channel|>analysis<|message|>Ask.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
                '<|constrain|>json<|message|>{"city": "Lima"}<|call|>',
                "",
                {"thinking": "Ask.", "reasoning_content": "Ask.", "tool_calls": [CALL]},
            ),
            (RESULT, "<|channel|>final<|message|>It is warm.", "It is warm.", says("It is warm.")),
        ],
        response_template=GPT_OSS_ANSWERS,
    ),
    "gpt-oss, not parsed": Family(
        GPT_OSS,
        GPT_OSS_TOKENS,
        [
            (
                "Hi",
                text
                := "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello!",
                text,
                says("Hello!"),
            ),
            ("Go on", text := "<|channel|>analysis<|message|>Cut off", text, says("")),
            ("Again", "<|channel|>final<|message|>Yes.", "<|channel|>final<|message|>Yes.", says("Yes.")),
        ],
    ),
    "qwen2.5": Family(
        QWEN2_5,
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        [
            ("Hi", "Hello!", "Hello!", says("Hello!")),
            (
                "Weather?",
                'I ask.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lima"}}\n</tool_call>',
                "I ask.",
                {"content": "I ask.", "tool_calls": [CALL]},
            ),
            (
                [RESULT, RESULT],
                "Warm, <tool_call>\nbut broken",
                "Warm, <tool_call>\nbut broken",
                says("Warm, <tool_call>\nbut broken"),
            ),
        ],
        {"tools": [WEATHER]},
        qwen=True,
        added=("<tool_call>", "</tool_call>"),
    ),
    "qwen3": Family(
        QWEN3,
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        [
            (
                "Hi",
                "<think>\nA greeting.\n</think>\n\nHello!",
                "Hello!",
                {"reasoning_content": "A greeting.", "content": "Hello!"},
            ),
            ("Go on", "<think>\nCut off", "", {"reasoning_content": "Cut off", "content": ""}),
            ("Why?", "<think>\n\n</think>\n\nSo.\n", "So.", says("So.")),
        ],
        qwen=True,
        added=("<think>", "</think>"),
    ),
    "deepseek-r1": Family(
        R1,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        [
            ("Hi", text := "A greeting.\n</think>\n\nHello!", text, says(text)),
            ("Say no", "</think>No.", "</think>No.", says("</think>No.")),
            ("Why?", "So.", "So.", says("So.")),
        ],
        added=("<think>", "</think>"),
    ),
    "llama3.2": Family(
        LLAMA,
        ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        PLAIN_TURNS,
        system="Be brief.",
    ),
    "gemma2": Family(GEMMA, ("<bos>", "<end_of_turn>", "<start_of_turn>"), PLAIN_TURNS),
    "smolvlm": Family(
        SMOLVLM, ("<|im_start|>", "<end_of_utterance>", "<image>"), PLAIN_TURNS, system="Be brief.", parts=True
    ),
    "llava": Family(LLAVA, ("<s>", "</s>"), PLAIN_TURNS, parts=True),
    "mistral, tool tokens": Family(
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        [
            ("Weather?", MISTRAL_CALL, MISTRAL_CALL, says(MISTRAL_CALL)),
            (RESULT, "Warm.", "Warm.", says("Warm.")),
            PLAIN_TURNS[0],
        ],
    ),
    "mistral, own": Family(None, ("<s>", "</s>", "[INST]", "[/INST]"), PLAIN_TURNS),
}


class OwnTemplate(PreTrainedTokenizerFast):
    """Writes messages as `MistralCommonBackend` does: without a template, and never with an answer at the end."""

    def apply_chat_template(
        self,
        conversation,
        tools=None,
        add_generation_prompt=False,
        continue_final_message=False,
        tokenize=True,
        return_tensors=None,
        return_dict=True,
    ):
        if conversation[-1]["role"] == "assistant":
            raise ValueError("expected last role User or Tool")
        text = "<s>"
        for message in conversation:
            text += f"[INST]{message['content']}[/INST]" if message["role"] == "user" else f"{message['content']}</s>"
        if not tokenize:
            return text
        out = self(text, add_special_tokens=False, return_tensors=return_tensors)
        return out if return_dict else out["input_ids"]

    def get_chat_template(self, *args, **kwargs):
        raise NotImplementedError


def tokenizer_of_bytes(family: Family):
    """One token a byte, and the special tokens of the family."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    kind = OwnTemplate if family.template is None else PreTrainedTokenizerFast
    begin, end, *others = family.special
    made = kind(tokenizer_object=core, bos_token=begin, eos_token=end, extra_special_tokens=others)
    made.add_tokens(list(family.added))
    made.chat_template, made.response_template = family.template, family.response_template
    return made
