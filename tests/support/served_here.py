"""The server in threads of the test's own process, with a tiny model that writes what `logit_bias` says."""

import contextlib
import http.client
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import transformers
from cases import tiny_models
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_lowbit_kv.requests.paged_calls import SUPPORTED

for package in ("openai", "fastapi", "uvicorn"):
    pytest.importorskip(package)
if ".".join(transformers.__version__.split(".")[:2]) not in SUPPORTED:
    pytest.skip("not a release of transformers whose server is extended", allow_module_level=True)

ROWS, MOST_OPEN, LONGEST = 4, 48, 100_000
#: far more tokens than are written while a test runs
ENDLESS = 20_000
#: the most steps of the loop between two tokens of a stream that a client reads
STEPS = 60
ANCHOR = "<|im_start|>assistant\n"
#: texts that are a token each, from number 100 on
TEXTS = [
    *('<tool_call>{"name": "now"}', "<tool_call>[1, 2]", "<tool_call>5", "<tool_call>", "</tool_call>", "<tool_call>{"),
    *('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "<tool_call>{oops</tool_call>"),
    *("one END two", "é", "<0xE2>", "<0x82>", "<think>", "</think>", "\n\n", "Hello"),
]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{{ message.content }} {% endfor %}{% if tools %}{{ tools | length }} {% endif %}{% if fast %}9 {% endif %}"
    "{{ '<|im_start|>assistant\\n' }}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def number(text: str) -> int:
    """The token of one of `TEXTS`."""
    return 100 + TEXTS.index(text)


def writes(*texts: str) -> dict[str, Any]:
    """Options of an answer that repeats one of `TEXTS`."""
    return {"logit_bias": {str(number(text)): 100 for text in texts}, "temperature": 0}


def save(path: Path) -> None:
    """A model of the kind whose answers transformers parses, and its tokenizer."""
    words = {**{str(i): i for i in range(100)}, **{text: 100 + i for i, text in enumerate(TEXTS)}}
    words |= {f"w{i}": i for i in range(len(words), 159)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(ANCHOR, normalized=False, special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    tiny_models("qwen3", max_position_embeddings=LONGEST)[1].save_pretrained(path)


class Here:
    """A running server. `rows()` are in use; `steps()` were taken."""

    def __init__(self, folder: Path, share_prefixes: bool = False, **options: Any):
        import uvicorn

        from hf_lowbit_kv.requests.request_loop import RequestLoop
        from hf_lowbit_kv.requests.server.openai_server import OneModel, PatientServer, bind, build_app

        self.models = OneModel(str(folder), folder.name, device="cpu")
        model, tokenizer = self.models.load_model_and_processor(self.models.process_model_name(str(folder)))
        self.loop = RequestLoop(
            model, tokenizer, "dense", memory=250_000_000, max_rows=ROWS, chunk_size=256, share_prefixes=share_prefixes
        )
        self.app = build_app(self.models, self.loop, max_open=MOST_OPEN, **options)
        self.scheduler = self.loop._scheduler
        self._sockets = contextlib.ExitStack()
        sockets = bind("127.0.0.1", 0, self._sockets)
        for each in sockets:
            each.listen()
        self.port = sockets[0].getsockname()[1]
        self.server = PatientServer(uvicorn.Config(self.app, log_level="error"), self.loop, 1, MOST_OPEN)
        self._thread = threading.Thread(target=self.server.run, args=(sockets,), daemon=True)
        self._thread.start()

    def rows(self) -> int:
        return len(self.scheduler.running)

    def steps(self) -> int:
        return self.scheduler.steps.taken

    def close(self) -> None:
        self.server.should_exit = True
        self.loop.cancel_all()
        self._thread.join()
        self.loop.stop()
        self._sockets.close()

    def ask(self, body: Any, route: str = "/v1/chat/completions", headers: dict[str, str] | None = None) -> tuple:
        """Status, and the body in JSON: that of a whole answer, or a list of the events of a stream."""
        connection = self.send(body, route, headers)
        try:
            answer = connection.getresponse()
            text = answer.read().decode()
            if "event-stream" in answer.headers["content-type"]:
                events = [line[6:] for line in text.split("\n\n") if line]
                return answer.status, [json.loads(each) for each in events if each != "[DONE]"]
            return answer.status, json.loads(text)
        finally:
            connection.close()

    def send(self, body: Any, route: str = "/v1/chat/completions", headers: dict[str, str] | None = None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        text = body if isinstance(body, (bytes, str)) else json.dumps(body)
        connection.request("POST", route, text, {"content-type": "application/json", **(headers or {})})
        return connection

    def wait(self, condition, seconds: float = 30) -> None:
        """Wait until something is true."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it does not come true"
            time.sleep(0.005)


def chat(content: str = "5 6 7", **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **options}


def text_of(answer: Any) -> str:
    """The text of a whole answer, or of the events of a stream."""
    if isinstance(answer, list):
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in answer)
    return answer["choices"][0]["message"].get("content") or ""


class Stream:
    """A good stream beside everything else. Its reader counts the steps of the loop between two of its tokens."""

    def __init__(self, here: Here):
        self._here, self.tokens, self.largest = here, 0, 0
        self._connection = here.send(chat(**writes("Hello"), max_tokens=ENDLESS, stream=True))
        self._answer = self._connection.getresponse()
        self._stop, self._thread = False, threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        here.wait(lambda: self.tokens > 2)

    def _read(self) -> None:
        before = None
        while not self._stop:
            line = self._answer.readline()
            if b'"content":"Hello"' in line:
                now = self._here.steps()
                if before is not None:
                    self.largest = max(self.largest, now - before)
                before = now
                self.tokens += 1
            elif not line or b'"error"' in line:
                return

    def goes_on(self) -> None:
        """Its tokens come, with few steps of the loop between them."""
        seen = self.tokens
        self._here.wait(lambda: self.tokens > seen + 2 or not self._thread.is_alive())
        assert self._thread.is_alive(), "the stream has ended"
        assert self.largest <= STEPS, f"{self.largest} steps of the loop between two tokens"

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        self._answer.close()
        self._connection.close()
