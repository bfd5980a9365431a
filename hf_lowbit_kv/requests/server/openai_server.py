"""transformers' OpenAI-compatible server with a low-bit cache: its routes, its handlers, its model loading.

Our own parts: rows of a pool generate (`generation_manager.py`, `answer_text.py`), fields that cannot be honoured are
refused (`request_fields.py`), and clients are limited and may leave (`clients.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server

from ...cache.prefix_store import PrefixStore
from ..request_loop import RequestLoop
from ..result import described
from .clients import Clients, SlowClients
from .generation_manager import PoolGenerateManager, PoolState
from .handlers import TOKEN_BYTES, ChatHandler, TextHandler, check_model_name
from .openai_errors import answer_errors

#: routes that would unload the model while rows run on it, load another one, or run it without packed pages
DROPPED = {"/reset", "/load_model", "/v1/audio/transcriptions", "/v1/systemone", "/v1/responses"}
#: seconds that cancelled requests may take at the end of the server: a chunk of a prompt is read to its end
CANCELLING = 5
#: bytes that a body may have beside those for each token of the longest row
BODY_BYTES = 2**20
#: requests that may wait for a row
MOST_WAITING = 512


class OneModel(ModelManager):
    """transformers' model manager, for the single model that is served.

    Args:
        name: hub name or folder.
        served: the model's id for clients. options: of transformers' model manager.
    """

    def __init__(self, name: str, served: str, **options: Any):
        super().__init__(force_model=name, **options)
        self.served = served

    def list_models(self, cache_dir: str | None = None) -> list[dict]:
        """The answer of `/v1/models`. Older releases list the hub's cache, and fail if there is none."""
        return [{"id": self.served, "object": "model", "created": 0, "owned_by": "local"}]

    get_gen_models = list_models  # its name in older releases

    def shutdown(self) -> None:
        """Called at the end of the server. transformers would collect garbage, which takes a second, to free a model that
        the end of the process frees anyway."""


def bind(host: str, port: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Sockets at all addresses of the host that this machine has, which `stack` closes. They do not listen yet, so that
    clients are refused while the model is loaded."""
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, _, _, address in dict.fromkeys(addresses):
            try:
                bound = stack.enter_context(socket.socket(family, kind))
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                bound.bind(address)
                sockets.append(bound)
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                missing = error  # "localhost" is often an IPv6 address too, where the machine has no IPv6
        if missing is not None and not sockets:
            raise missing
    except OSError as error:
        message = f"host={host!r}, port={port} cannot be listened to: {error.strerror}; choose another port or host"
        raise ValueError(message) from None
    return sockets


def url_of(host: str, port: int) -> str:
    """What clients take as `base_url`. An IPv6 address has brackets there."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def served_name(name: str) -> str:
    """The id of a model: its hub name, or the last part of its folder."""
    folder = Path(name)
    return folder.resolve().name if folder.exists() else name


class PatientServer(uvicorn.Server):
    """uvicorn's server. When it shuts down, answers have some seconds to end; the rest is cancelled, and clients get an error.
    It shuts down by itself when no request can be answered any more.

    Args:
        requests: answers them.
        patience: seconds.
        max_open: requests at once.
    """

    def __init__(self, config: uvicorn.Config, requests: RequestLoop, patience: float, max_open: int):
        super().__init__(config)
        self._requests, self._patience, self._slow = requests, patience, SlowClients(max_open)
        config.timeout_graceful_shutdown = int(patience + CANCELLING)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second. Returns whether to shut down."""
        if counter % 10 == 0:
            self._slow.close(self, time.monotonic())
        return await super().on_tick(counter) or not self._requests.alive

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._patience, self._requests.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def build_app(
    models: OneModel,
    requests: RequestLoop,
    *,
    max_open: int,
    api_key: str | None = None,
    allow_origins: Sequence[str] = (),
) -> Any:
    """The ASGI application.

    Args:
        max_open: requests at once.
        api_key: what clients must send; `None`: nothing.
        allow_origins: web pages whose scripts may ask (CORS); `"*"`: all.
    """
    manager = PoolGenerateManager(requests)
    state = PoolState(requests)
    handlers: dict[str, Any] = {name: None for name in inspect.signature(build_server).parameters if "_handler" in name}
    handlers["chat_handler"] = ChatHandler(models, state, manager, models.served)
    handlers["completion_handler"] = TextHandler(models, state, manager, models.served)
    app = build_server(models, **handlers, generation_state=state)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in DROPPED]

    @app.get("/v1/models/{name:path}")  # a hub name has a slash
    def model_of_this_name(name: str) -> dict[str, Any]:
        check_model_name(name, models)
        return models.list_models()[0]

    answer_errors(app)
    max_body_bytes = BODY_BYTES + TOKEN_BYTES * requests.pool.longest
    clients = Clients(app, manager, max_body_bytes, max_open, api_key)
    if not allow_origins:
        return clients
    return CORSMiddleware(clients, allow_origins=allow_origins, allow_methods=("GET", "POST"), allow_headers=("*",))


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
    max_waiting: int = MOST_WAITING,
    chunk_size: int = 2048,
    share_prefixes: bool = True,
    prefixes: PrefixStore | None = None,
    served_model_name: str | None = None,
    api_key: str | None = None,
    allow_origins: Sequence[str] = (),
    patience: float = 10.0,
    cache_options: dict[str, Any] | None = None,
    say: Callable[[str], Any] = print,
    ready: Callable[[dict[str, Any]], Any] | None = None,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C. Unfinished answers then have `patience` seconds.

    Raises:
        ValueError: `allow_origins` contains a value that is not an origin, or the address cannot be listened to, e.g.
            because another server does. Nothing is loaded then. Or the tokenizer writes messages without a chat template.
            Or as for `RequestLoop`.
        RuntimeError: no request can be answered any more, e.g. because the GPU has failed.

    Args:
        name: hub name or folder.
        memory, max_rows, share_prefixes: see `generate_many`;
        chunk_size: its `prefill_chunk_size`.
        prefixes: see `RequestLoop`.
        max_waiting: requests that may wait for a row; others get HTTP 429.
        served_model_name: the model's id for clients; `None`: see `served_name`.
        api_key, allow_origins: see `build_app`.
        say: called with one line when the server is ready.
        ready: called at the same time, with `url`, `model`, `preset`, `rows` (at once), `row_tokens` (largest) and
            `bytes` of the pool.
    """
    for origin in allow_origins:  # browsers send no path: an origin with one would never match
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            raise ValueError(
                f"allow_origins={origin!r} is not allowed; it must be * or a scheme and a host, such as https://page.example"
            )
    with contextlib.ExitStack() as stack:
        sockets = bind(host, port, stack)
        served = served_name(name) if served_model_name is None else served_model_name
        models = OneModel(name, served, device=device, dtype=dtype)
        model, processor = models.load_model_and_processor(models.process_model_name(name))
        tokenizer = getattr(processor, "tokenizer", processor)
        if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            raise ValueError(
                f"{name!r} has a {type(tokenizer).__name__}, which is not served: it writes messages without a chat template. "
                "Save the model with a tokenizer of the tokenizers library, and serve that folder"
            )
        requests = RequestLoop(
            model,
            tokenizer,
            preset,
            memory=memory,
            max_rows=max_rows,
            chunk_size=chunk_size,
            share_prefixes=share_prefixes,
            prefixes=prefixes,
            cache_options=cache_options,
        )
        stack.callback(requests.stop)
        max_open = requests.pool.slots + max_waiting
        app = build_app(models, requests, max_open=max_open, api_key=api_key, allow_origins=allow_origins)
        config = uvicorn.Config(app, host=host, port=port, log_level="warning")
        for each in sockets:
            each.listen()  # clients that come now wait a moment
        pool = requests.pool
        url = url_of(host, port)
        say(
            f"{served} with {preset}: {pool.slots} rows at once, of up to {pool.longest} tokens; "
            f"{pool.memory.nbytes / 1e9:.2f} GB. {url}"
        )
        if ready is not None:
            sizes = {"rows": pool.slots, "row_tokens": pool.longest, "bytes": pool.memory.nbytes}
            ready({"url": url, "model": served, "preset": preset} | sizes)
        # uvicorn shuts down at SIGTERM, and then raises the signal again for the earlier handler
        if threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: None))
        PatientServer(config, requests, patience, max_open).run(sockets)
        if requests.error is not None:
            raise RuntimeError(f"no request can be answered any more: {described(requests.error)}") from requests.error
