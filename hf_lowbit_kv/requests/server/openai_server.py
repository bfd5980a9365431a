"""transformers' OpenAI-compatible server with a low-bit cache: its routes, its handlers, its model loading.

Our own parts: rows of a pool generate (`generation_manager.py`), fields that cannot be honoured are refused
(`handlers.py`), and a client that disconnects frees its row (`Departures`).
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import uuid
from collections.abc import Callable
from typing import Any

import uvicorn
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server

from ..request_loop import RequestLoop
from .generation_manager import PoolGenerateManager, PoolState
from .handlers import ChatHandler, NotServed, TextHandler

#: routes that would unload the model while rows run on it, or load another one
DROPPED = {"/reset", "/load_model", "/v1/audio/transcriptions", "/v1/systemone", "/v1/responses"}
REQUEST_ID = b"x-request-id"


class OneModel(ModelManager):
    """transformers' model manager, for the single model that is served."""

    def list_models(self, cache_dir: str | None = None) -> list[dict]:
        """The answer of `/v1/models`. Older releases list the hub's cache, and fail if there is none."""
        name = str(self.force_model)
        return [{"id": name, "object": "model", "created": 0, "owned_by": "local"}]

    get_gen_models = list_models  # its name in older releases


class Departures:
    """ASGI middleware: a client that disconnects before its answer is complete frees its row.

    Args:
        app: the server. manager: told which request to cancel.
    """

    def __init__(self, app: Any, manager: PoolGenerateManager):
        self.app, self.manager = app, manager

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        name = f"{uuid.uuid4()}"  # our own id, because two clients may send the same one
        headers = [(key, value) for key, value in scope["headers"] if key != REQUEST_ID]
        scope = {**scope, "headers": [*headers, (REQUEST_ID, name.encode())]}
        messages, gone = await _whole_body(receive), asyncio.Event()
        watch = asyncio.create_task(self._watch(receive, gone, name))

        async def replayed() -> Any:
            if messages:
                return messages.pop(0)
            await gone.wait()
            return {"type": "http.disconnect"}

        try:
            await self.app(scope, replayed, send)
        finally:
            watch.cancel()

    async def _watch(self, receive: Any, gone: asyncio.Event, name: str) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        self.manager.cancel(name)


async def _whole_body(receive: Any) -> list[Any]:
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
        messages.append(await receive())
    return messages


def build_app(models: ModelManager, requests: RequestLoop) -> Any:
    """The ASGI application."""
    manager = PoolGenerateManager(requests)
    state = PoolState(manager)
    handlers = {
        "chat_handler": ChatHandler(models, state),
        "completion_handler": TextHandler(models, state),
        "response_handler": NotServed(),
        "transcription_handler": NotServed(),
        "systemone_handler": NotServed(),
    }
    known = inspect.signature(build_server).parameters  # not every release has all these routes
    app = build_server(models, **{name: x for name, x in handlers.items() if name in known}, generation_state=state)  # type: ignore[arg-type]
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in DROPPED]
    return Departures(app, manager)


def serve(
    name: str,
    preset: str,
    host: str,
    port: int,
    *,
    device: str = "auto",
    dtype: str = "auto",
    memory: int | None = None,
    max_rows: int | None = None,
    patience: float = 10.0,
    cache_options: dict[str, Any] | None = None,
    say: Callable[[str], Any] = print,
    ready: Callable[[dict[str, Any]], Any] | None = None,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C. Unfinished answers then have `patience` seconds.

    Args:
        name: hub name or folder. memory, max_rows: see `generate_many`. say: called with one line when the server is
            ready.
        ready: called at the same time, with `url`, `model`, `preset`, `rows` (at once), `row_tokens` (largest) and
            `bytes` of the pool.
    """
    models = OneModel(device=device, dtype=dtype, force_model=name)
    model, processor = models.load_model_and_processor(models.process_model_name(name))
    tokenizer = getattr(processor, "tokenizer", processor)
    requests = RequestLoop(model, tokenizer, preset, memory=memory, max_rows=max_rows, cache_options=cache_options)
    pool = requests.pool
    url = f"http://{host}:{port}/v1"
    say(
        f"{name} with {preset}: {pool.slots} rows at once, of up to {pool.longest} tokens; "
        f"{pool.memory.nbytes / 1e9:.2f} GB. {url}"
    )
    if ready is not None:
        sizes = {"rows": pool.slots, "row_tokens": pool.longest, "bytes": pool.memory.nbytes}
        ready({"url": url, "model": name, "preset": preset} | sizes)
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(models, requests),
            host=host,
            port=port,
            log_level="warning",
            timeout_graceful_shutdown=int(patience),
        )
    )
    # uvicorn shuts down at SIGTERM, and then raises the signal again for the earlier handler
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: None) if in_main else None
    try:
        server.run()
    finally:
        requests.stop()
        if in_main:
            signal.signal(signal.SIGTERM, before)
