"""transformers' request handlers on a pool of rows. Prompts are made in worker threads, and answers are read from queues."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anyio
from fastapi import HTTPException
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletionMessageToolCall
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall
from openai.types.completion_usage import PromptTokensDetails
from starlette.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import ReasoningText, ToolCall
from transformers.utils.chat_template_utils import _compile_jinja_template, _get_template_variables

from ...generation.answer_parser import AnswerParser, parser_for, unshown_tokens
from ...generation.chat_prompt import ChatPrompt
from ..result import Result
from .answer_text import AnswerStreamer, Failure
from .generation_manager import MAY_SHORTEN, SEED, PoolGenerateManager, PoolState
from .openai_errors import Refused, error_body, shown
from .request_fields import OWN, check_fields, check_template_values, read_settings, template_messages

#: number of threads that make prompts
THREADS = 4
#: bytes per token of the longest row: the limit of a prompt, and the bytes of usual texts
TOKEN_BYTES, USUAL_BYTES = 64, 4


@dataclass
class Answer:
    """An answer while it is written."""

    id: str
    prompt_tokens: int
    queue: asyncio.Queue
    streamer: AnswerStreamer
    calls: int = 0
    """tool calls that were streamed"""

    async def parts(self) -> AsyncIterator[list[Any]]:
        """The parts that have come, again and again until the end. See `AnswerStreamer`."""
        while True:
            batch = [await self.queue.get()]
            while not self.queue.empty():
                batch.append(self.queue.get_nowait())
            last = batch[-1]
            if parts := [item for item in batch if item is not None and not isinstance(item, Result)]:
                yield parts
            if isinstance(last, Result):  # of an answer that is not streamed
                await anyio.to_thread.run_sync(self.streamer.read, last)
            elif last is None:
                return

    @property
    def usage(self) -> CompletionUsage:
        tokens, result = self.streamer.total_tokens, self.streamer.result
        return CompletionUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=tokens,
            total_tokens=self.prompt_tokens + tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=0 if result is None else result.cached_tokens),
        )


def check_model_name(name: Any, models: Any) -> None:
    """Raise HTTP 404 unless this is a name of the served model."""
    if name not in (models.served, models.force_model):
        raise Refused(404, f"model={shown(name)} is not served; {models.served!r} is", "model", "model_not_found")


class _PoolHandler:
    """A mixin for transformers' handlers.

    Args:
        models: transformers' model manager, with one model.
        manager: of the requests.
        served: the model's id for clients.
    """

    _valid_params_class: Any
    model_manager: Any
    #: the field that says what the model reads
    _reads: str

    def __init__(self, models: Any, state: PoolState, manager: PoolGenerateManager, served: str):
        super().__init__(models, state)  # type: ignore[call-arg]
        self._manager, self._served = manager, served
        self._model, self._processor = models.load_model_and_processor(models.process_model_name(models.force_model))
        self._tokenizer = getattr(self._processor, "tokenizer", self._processor)
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        self._threads: anyio.CapacityLimiter | None = None

    async def handle_request(self, body: dict, request_id: str) -> StreamingResponse | JSONResponse:
        """Answer a request. A worker thread makes the prompt, so that other answers continue."""
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(THREADS)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        answer = await anyio.to_thread.run_sync(self._begin, body, request_id, loop, queue, limiter=self._threads)
        if body.get("stream"):
            return StreamingResponse(self._stream(answer), media_type="text/event-stream")
        return JSONResponse(await self._whole(answer))

    def _begin(self, body: dict, request_id: str, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Any]) -> Answer:
        """Read a request, make its prompt, and submit it. Python, transformers and chat templates raise errors of all kinds
        for what they cannot read: these become HTTP 400."""
        try:
            self._validate_request(body)
            if body.get("model") is not None:
                check_model_name(body["model"], self.model_manager)
            config = self._build_generation_config(body, self._model.generation_config, use_cb=True)
            ids = self._prompt(body)
            stops = config.stop_strings or []
            stops = [stops] if isinstance(stops, str) else list(stops)
            parser = self._parser(body, ids)
            unshown = unshown_tokens(self._tokenizer, config.eos_token_id, parser)
            streamer = AnswerStreamer(self._tokenizer, loop, queue, parser, stops, unshown, self._manager.requests)
        except HTTPException:
            raise
        except Exception as error:
            raise Refused(400, f"the request cannot be read: {type(error).__name__}: {error!s:.500}") from error
        self._manager.submit(request_id, ids, config, streamer, bool(body.get("stream") or stops))
        return Answer(request_id, len(ids), queue, streamer)

    # ---- the request ----------------------------------------------------------------------------------------------

    def _validate_request(self, body: dict) -> None:
        known = set(getattr(self._valid_params_class, "__mutable_keys__", set())) | OWN
        check_fields(body, known, self._reads)
        # transformers logs that it ignores tool_choice; `_tools` honours it
        unknown_there = OWN | {"tool_choice"}
        super()._validate_request({name: x for name, x in body.items() if name not in unknown_there})  # type: ignore[misc]

    def _build_generation_config(self, body: dict, model_generation_config: Any, use_cb: bool = False) -> Any:
        # transformers would seed the whole process
        settings = {name: value for name, value in body.items() if name not in ("seed", "logit_bias")}
        if "generation_config" in body:
            settings["generation_config"] = json.dumps(read_settings(body["generation_config"], self._vocabulary))
        config = super()._build_generation_config(settings, model_generation_config, use_cb=use_cb)  # type: ignore[misc]
        config.use_cache = True
        for name in OWN & body.keys():
            setattr(config, name, max(body[name], 0))  # top_k=-1 is off, as 0
        if bias := body.get("logit_bias"):  # transformers wants floats, and ignores it in texts
            config.sequence_bias = {(int(token),): float(value) for token, value in bias.items()}
        if body.get("temperature") == 0:
            config.do_sample, config.temperature, config.top_p, config.top_k = False, None, None, None
        elif "temperature" in body or body.get("top_k", 0) > 0 or body.get("top_p", 1) != 1:
            config.do_sample = True  # transformers leaves a greedy model greedy at any temperature
        if body.get("top_p") == 0:
            config.top_p, config.top_k = None, 1
        setattr(config, SEED, body.get("seed"))
        limits = {"max_tokens", "max_completion_tokens", "generation_config"}
        setattr(config, MAY_SHORTEN, not limits & body.keys())
        return config

    def _prompt(self, body: dict) -> list[int]:
        raise NotImplementedError

    def _ids(self, text: str, **options: Any) -> list[int]:
        """The tokens of a prompt. If a prompt is far too long, only a part of it is tokenized."""
        longest = self._manager.requests.pool.longest
        if (size := len(text.encode())) > TOKEN_BYTES * longest:
            raise Refused(400, f"the prompt has {size} bytes, which is more than a row may hold", self._reads)
        for part in (text[: USUAL_BYTES * longest], text):
            ids = list(self._tokenizer(part, **options)["input_ids"])
            if len(ids) > longest:
                message = f"the prompt has {len(ids)} tokens or more, which does not fit: a row may hold {longest}"
                raise Refused(400, message, self._reads)
            if len(part) == len(text):
                break
        return ids

    def _parser(self, body: dict, ids: list[int]) -> AnswerParser | None:
        return None

    # ---- the answer -----------------------------------------------------------------------------------------------

    async def _stream(self, answer: Answer) -> AsyncIterator[str]:
        for part in self._opening(answer):
            yield part
        async for batch in answer.parts():
            failure = batch[-1] if isinstance(batch[-1], Failure) else None
            events = [self._event(answer, item) for item in batch if item is not failure]
            if failure is not None:
                events.append(f"data: {json.dumps(error_body(failure.status, failure.message))}\n\n")
            yield "".join(events)
            if failure is not None:
                return
        for part in self._closing(answer):
            yield part
        yield "data: [DONE]\n\n"

    async def _whole(self, answer: Answer) -> dict[str, Any]:
        items: list[Any] = []
        async for batch in answer.parts():
            items += batch
        if items and isinstance(items[-1], Failure):
            raise Refused(items[-1].status, items[-1].message)
        return self._answer(answer, items)

    def _opening(self, answer: Answer) -> list[str]:
        return []

    def _event(self, answer: Answer, item: Any) -> str:
        raise NotImplementedError

    def _closing(self, answer: Answer) -> list[str]:
        raise NotImplementedError

    def _answer(self, answer: Answer, items: list[Any]) -> dict[str, Any]:
        raise NotImplementedError


def _text(items: list[Any], kind: type) -> str:
    return "".join(str(item) for item in items if type(item) is kind)


class ChatHandler(_PoolHandler, ChatCompletionHandler):
    """`/v1/chat/completions`."""

    _reads = "messages"

    def _prompt(self, body: dict) -> list[int]:
        values, tools = body.get("chat_template_kwargs", {}), _tools(body)
        check_template_values(values, self._variables(tools))
        messages = template_messages(body["messages"])
        text = ChatPrompt(self._processor, messages, {**values, "tools": tools}).text
        if tools and text == ChatPrompt(self._processor, messages, values).text:
            raise Refused(400, "tools: the chat template of the model has none; leave them out", "tools")
        return self._ids(text, add_special_tokens=False)

    def _variables(self, tools: list[dict] | None) -> set[str]:
        """Variables of the chat template that are a client's own."""
        template = self._tokenizer.get_chat_template(None, tools)
        others = {
            "messages",
            *self._tokenizer.special_tokens_map,
            *_compile_jinja_template(template).environment.globals,
        }
        others |= set(inspect.signature(self._tokenizer.apply_chat_template).parameters) - {"documents"}
        return set(_get_template_variables(template)) - others

    def _parser(self, body: dict, ids: list[int]) -> AnswerParser | None:
        prompt, calls = self._tokenizer.decode(ids), body.get("tool_choice") != "none"
        return parser_for(self._tokenizer, self._model, prompt, _tools(body), calls)

    # ---- the answer -----------------------------------------------------------------------------------------------

    def _opening(self, answer: Answer) -> list[str]:
        return [self._build_chunk_sse(answer.id, role="assistant", model=self._served)]

    def _event(self, answer: Answer, item: Any) -> str:
        if isinstance(item, ReasoningText):
            return self._build_chunk_sse(answer.id, model=self._served, reasoning_content=item)
        if not isinstance(item, ToolCall):
            return self._build_chunk_sse(answer.id, model=self._served, content=item)
        index = answer.calls
        answer.calls += 1
        call = ChoiceDeltaToolCall.model_validate({"index": index, **_call(answer, index, item)})
        return self._build_chunk_sse(answer.id, model=self._served, tool_calls=[call])

    def _closing(self, answer: Answer) -> list[str]:
        reason = "tool_calls" if answer.calls else answer.streamer.finish_reason
        return [self._build_chunk_sse(answer.id, finish_reason=reason, model=self._served, usage=answer.usage)]

    def _answer(self, answer: Answer, items: list[Any]) -> dict[str, Any]:
        calls: Any = [
            ChatCompletionMessageToolCall.model_validate(_call(answer, index, item))
            for index, item in enumerate(item for item in items if isinstance(item, ToolCall))
        ]
        return self._build_completion(
            answer.id,
            _text(items, str),
            self._served,
            finish_reason="tool_calls" if calls else answer.streamer.finish_reason,
            usage=answer.usage,
            tool_calls=calls or None,
            reasoning_content=_text(items, ReasoningText) or None,
        )


def _tools(body: dict) -> list[dict] | None:
    """The tools that the model may call."""
    return None if body.get("tool_choice") == "none" else body.get("tools")


def _call(answer: Answer, index: int, call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"{answer.id}_tool_call_{index}", "type": "function", "function": function}


class TextHandler(_PoolHandler, CompletionHandler):
    """`/v1/completions`."""

    _reads = "prompt"

    def _prompt(self, body: dict) -> list[int]:
        return self._ids(body["prompt"])

    def _event(self, answer: Answer, item: Any) -> str:
        return self._build_chunk_sse(answer.id, self._served, text=item)

    def _closing(self, answer: Answer) -> list[str]:
        reason = answer.streamer.finish_reason
        return [self._build_chunk_sse(answer.id, self._served, finish_reason=reason, usage=answer.usage)]

    def _answer(self, answer: Answer, items: list[Any]) -> dict[str, Any]:
        reason: Any = answer.streamer.finish_reason
        choice = CompletionChoice(text=_text(items, str), index=0, logprobs=None, finish_reason=reason)
        completion = Completion(
            id=answer.id,
            created=int(time.time()),
            model=self._served,
            choices=[choice],
            object="text_completion",
            usage=answer.usage,
        )
        return completion.model_dump(exclude_none=True)
