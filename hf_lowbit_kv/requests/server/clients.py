"""Limits for clients of the server: API key, size of a body, open requests, and clients that disconnect or stall."""

from __future__ import annotations

import asyncio
import hmac
import socket
import sys
import uuid
import weakref
from typing import Any

import uvicorn

from .generation_manager import PoolGenerateManager
from .openai_errors import error_response

REQUEST_ID = b"x-request-id"
#: longest `x-request-id` of a client that is returned in the answer
ID_BYTES = 256
#: seconds within which a client must send its request, and must read a part of its answer
SLOW = 60.0
#: bytes that are read and dropped of a body above the limit
DROPPED = 2**26
#: connections without a request that stay open beside those with one
IDLE_CONNECTIONS = 256
#: bodies that are being received, and their bytes. Beyond either, the oldest body is given up: others take milliseconds
BODIES, BODIES_BYTES = 256, 2**26


class Clients:
    """ASGI middleware. A client that disconnects before its answer is complete frees its row. A body that is too long for
    any row gets HTTP 413, and a request beyond `max_open` gets 429, before its prompt is tokenized. A request is open when
    its whole body has come.

    Args:
        app: the server.
        manager: notified when clients connect and disconnect.
        max_body_bytes: largest size of a body.
        max_open: largest number of open requests.
        api_key: the key that clients must send as `Authorization: Bearer KEY`; `None`: no key.
    """

    def __init__(
        self, app: Any, manager: PoolGenerateManager, max_body_bytes: int, max_open: int, api_key: str | None = None
    ):
        self.app, self.manager, self.max_body_bytes, self.max_open = app, manager, max_body_bytes, max_open
        self._key = None if api_key is None else api_key.encode()
        self._bodies: dict[asyncio.Task[Any], int] = {}  # that receive bodies, oldest first: bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        name = f"{uuid.uuid4()}"  # our own id, because two clients may send the same one
        headers = [(key, value) for key, value in scope["headers"] if key != REQUEST_ID]
        sent = next((value for key, value in scope["headers"] if key == REQUEST_ID), b"")
        shown = sent if 0 < len(sent) <= ID_BYTES else name.encode()

        async def reply(message: Any) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message.get("headers", ()) if pair[0].lower() != REQUEST_ID]
                message = {**message, "headers": [*kept, (REQUEST_ID, shown)]}
            await send(message)

        scope = {**scope, "headers": [*headers, (REQUEST_ID, name.encode())]}
        if not self._may_ask(scope):
            message = "a key is needed: Authorization: Bearer KEY"
            await error_response(401, message, code="invalid_api_key", headers=CLOSE)(scope, receive, reply)
        elif scope["method"] != "POST":
            await self.app(scope, receive, reply)
        else:
            await self._ask(scope, receive, reply, name)

    def _may_ask(self, scope: Any) -> bool:
        if self._key is None or scope["path"] == "/health":
            return True
        sent = next((value for key, value in scope["headers"] if key == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"

    async def _ask(self, scope: Any, receive: Any, send: Any, name: str) -> None:
        body = asyncio.create_task(self._body(receive))
        self._bodies[body] = 0
        self._give_up_oldest()
        try:
            await asyncio.wait((body,), timeout=SLOW)
        finally:
            del self._bodies[body]
            body.cancel()
        error = None
        if not body.done() or body.cancelled():
            message = f"the body did not come in {SLOW:.0f} seconds, or more than {BODIES} others came after it"
            error = error_response(408, message, headers=CLOSE)
        elif (messages := body.result()) is None:
            message = f"the body has more than {self.max_body_bytes} bytes, which is more than a row may hold"
            error = error_response(413, message, headers=CLOSE)
        elif messages[-1]["type"] == "http.disconnect":
            return
        elif len(self.manager) >= self.max_open:
            message = f"{self.max_open} requests are open, which is the most; try again later"
            error = error_response(429, message, code="rate_limit_exceeded", headers=CLOSE | {"retry-after": "1"})
        if error is not None:
            await error(scope, receive, send)
            return
        self.manager.enter(name)
        gone = asyncio.create_task(self._gone(receive))

        async def replayed() -> Any:
            if messages:
                return messages.pop(0)
            await asyncio.wait((gone,))
            return {"type": "http.disconnect"}

        answer = asyncio.create_task(self.app(scope, replayed, send))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.manager.leave(name)
            gone.cancel()
            answer.cancel()
        await asyncio.wait((answer,))
        if not answer.cancelled():
            answer.result()  # raises what it raised

    async def _body(self, receive: Any) -> list[Any] | None:
        """The messages of a body; `None` if it is longer than allowed. The rest of a longer body is read and dropped, up to
        `DROPPED` bytes, because a client whose body is not read would not receive the error."""
        task: Any = asyncio.current_task()
        messages, size = [await receive()], 0
        while messages[-1]["type"] == "http.request" and size <= self.max_body_bytes + DROPPED:
            size += len(messages[-1].get("body", b""))
            if size > self.max_body_bytes:
                del messages[:-1]
            if not messages[-1].get("more_body"):
                break
            self._bodies[task] = min(size, self.max_body_bytes)
            self._give_up_oldest()
            messages.append(await receive())
        return None if size > self.max_body_bytes else messages

    def _give_up_oldest(self) -> None:
        count, size = len(self._bodies), sum(self._bodies.values())
        for body in list(self._bodies)[:-1]:
            if count <= BODIES and size <= BODIES_BYTES:
                return
            body.cancel()
            count, size = count - 1, size - self._bodies[body]

    async def _gone(self, receive: Any) -> None:
        """Wait until the client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass


CLOSE = {"connection": "close"}


class SlowClients:
    """Closes stalled connections: the client does not read its answer, or does not send its request. If there are too many
    idle connections, the oldest are closed.

    Args:
        max_open: largest number of open requests.
    """

    def __init__(self, max_open: int):
        self._max_connections = max_open + IDLE_CONNECTIONS
        self._seen: weakref.WeakKeyDictionary[Any, tuple[Any, float]] = weakref.WeakKeyDictionary()

    def close(self, server: uvicorn.Server, now: float) -> None:
        """Called once a second, at `now` seconds of a clock."""
        idle = []
        connections: set[Any] = server.server_state.connections
        for each in list(connections):
            (unsent, received), cycle = _progress(each.transport), each.cycle
            asking = cycle is not None and not cycle.response_complete
            state = received, id(cycle), asking
            before, since = self._seen.get(each, (None, now))
            if state != before:
                self._seen[each] = state, now
            elif (unsent or not asking) and now - since >= SLOW:
                each.transport.abort()
            if not asking:
                idle.append((since, each))
        surplus = len(connections) - self._max_connections
        for _, each in sorted(idle, key=lambda pair: pair[0])[: max(surplus, 0)]:
            each.transport.abort()


def _progress(transport: Any) -> tuple[int, int]:
    """The number of bytes that wait for the client, and a number that changes when the client's machine receives some. The
    kernel takes megabytes before the transport holds any, so Linux is asked how many arrived."""
    unsent = transport.get_write_buffer_size()
    if sys.platform != "linux":
        return unsent, unsent
    connection = transport.get_extra_info("socket")
    with socket.fromfd(connection.fileno(), connection.family, connection.type) as same:
        info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 148)  # struct tcp_info
    arrived, unsent_here = (int.from_bytes(info[first:end], sys.byteorder) for first, end in ((120, 128), (144, 148)))
    return unsent + unsent_here, arrived or unsent  # some sandboxes do not count what arrived
