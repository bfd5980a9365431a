"""transformers' OpenAI-compatible server with a low-bit cache: its routes, its handlers, its model loading.

Our own parts: rows of a pool generate (`generation_manager.py`), fields that cannot be honoured are refused
(`handlers.py`), and a client that disconnects frees its row (`Departures`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import signal
import socket
import threading
import uuid
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server

from ..request_loop import RequestLoop
from .generation_manager import PoolGenerateManager, PoolState
from .handlers import ChatHandler, NotServed, TextHandler

#: routes that would unload the model while rows run on it, or load another one
DROPPED = {"/reset", "/load_model", "/v1/audio/transcriptions", "/v1/systemone", "/v1/responses"}
REQUEST_ID = b"x-request-id"
#: seconds that cancelled requests may take at the end of the server: a chunk of a prompt is read to its end
CANCELLING = 5
#: bytes that a body may have, and those for each token of the longest row. Usual texts have 4 bytes a token
BODY_BYTES, TOKEN_BYTES = 2**20, 64


class OneModel(ModelManager):
    """transformers' model manager, for the single model that is served."""

    def list_models(self, cache_dir: str | None = None) -> list[dict]:
        """The answer of `/v1/models`. Older releases list the hub's cache, and fail if there is none."""
        name = str(self.force_model)
        return [{"id": name, "object": "model", "created": 0, "owned_by": "local"}]

    get_gen_models = list_models  # its name in older releases


class Departures:
    """ASGI middleware: a client that disconnects before its answer is complete frees its row. A body that is too long for any
    row gets HTTP 413, before anybody waits for its tokens.

    Args:
        app: the server. manager: told which request to cancel. most_bytes: of a body.
    """

    def __init__(self, app: Any, manager: PoolGenerateManager, most_bytes: int):
        self.app, self.manager, self.most_bytes = app, manager, most_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        name = f"{uuid.uuid4()}"  # our own id, because two clients may send the same one
        headers = [(key, value) for key, value in scope["headers"] if key != REQUEST_ID]
        scope = {**scope, "headers": [*headers, (REQUEST_ID, name.encode())]}
        messages, gone = await _whole_body(receive, self.most_bytes), asyncio.Event()
        if messages is None:
            said = f"the body has more than {self.most_bytes} bytes, which is more than a row may hold"
            await JSONResponse({"detail": said}, 413, {"connection": "close"})(scope, receive, send)
            return
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


async def _whole_body(receive: Any, most_bytes: int) -> list[Any] | None:
    """The messages of a body; `None` if it is longer."""
    messages, size = [await receive()], 0
    while messages[-1]["type"] == "http.request":
        size += len(messages[-1].get("body", b""))
        if size > most_bytes:
            return None
        if not messages[-1].get("more_body"):
            break
        messages.append(await receive())
    return messages


def bind(host: str, port: int) -> list[socket.socket]:
    """Sockets at all addresses of the host that this machine has. They do not listen yet, so that clients are refused while
    the model is loaded."""
    sockets: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        missing: OSError | None = None
        for family, kind, _, _, address in dict.fromkeys(addresses):
            try:
                sockets.append(_bound(family, kind, address))
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                missing = error  # "localhost" is often an IPv6 address too, where the machine has no IPv6
        if missing is not None and not sockets:
            raise missing
    except OSError as error:
        for each in sockets:
            each.close()
        raise _not_free(host, port, error) from None
    return sockets


def _bound(family: int, kind: int, address: Any) -> socket.socket:
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def listen(sockets: list[socket.socket], host: str, port: int) -> None:
    """Let the sockets listen."""
    try:
        for each in sockets:
            each.listen()
    except OSError as error:
        raise _not_free(host, port, error) from None


def _not_free(host: str, port: int, error: OSError) -> ValueError:
    return ValueError(
        f"host={host!r}, port={port} cannot be listened to: {error.strerror}; choose another port or host"
    )


class PatientServer(uvicorn.Server):
    """uvicorn's server. When it shuts down, answers have some seconds to end; the rest is cancelled, and clients are told.

    Args:
        requests: answers them. patience: seconds.
    """

    def __init__(self, config: uvicorn.Config, requests: RequestLoop, patience: float):
        super().__init__(config)
        self._requests, self._patience = requests, patience
        config.timeout_graceful_shutdown = int(patience + CANCELLING)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._patience, self._requests.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


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
    return Departures(app, manager, BODY_BYTES + TOKEN_BYTES * requests.pool.longest)


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

    Raises:
        ValueError: the address cannot be listened to, e.g. because another server does. Nothing is loaded then.

    Args:
        name: hub name or folder. memory, max_rows: see `generate_many`. say: called with one line when the server is
            ready.
        ready: called at the same time, with `url`, `model`, `preset`, `rows` (at once), `row_tokens` (largest) and
            `bytes` of the pool.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(contextlib.closing(each)) for each in bind(host, port)]
        models = OneModel(device=device, dtype=dtype, force_model=name)
        model, processor = models.load_model_and_processor(models.process_model_name(name))
        tokenizer = getattr(processor, "tokenizer", processor)
        requests = RequestLoop(model, tokenizer, preset, memory=memory, max_rows=max_rows, cache_options=cache_options)
        stack.callback(requests.stop)
        config = uvicorn.Config(build_app(models, requests), host=host, port=port, log_level="warning")
        listen(sockets, host, port)  # clients that come now wait a moment
        pool = requests.pool
        url = f"http://{host}:{port}/v1"
        say(
            f"{name} with {preset}: {pool.slots} rows at once, of up to {pool.longest} tokens; "
            f"{pool.memory.nbytes / 1e9:.2f} GB. {url}"
        )
        if ready is not None:
            sizes = {"rows": pool.slots, "row_tokens": pool.longest, "bytes": pool.memory.nbytes}
            ready({"url": url, "model": name, "preset": preset} | sizes)
        # uvicorn shuts down at SIGTERM, and then raises the signal again for the earlier handler
        if threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: None))
        PatientServer(config, requests, patience).run(sockets)
