"""How the body of a request comes in: its bounds in bytes and in time, and an early reply."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec_mlx.server.requests import BodyError

MOST_BYTES = 2**25  # of a body: as many as Anthropic takes
PATIENCE = 30.0  # seconds that a body may take, and one second more for each `SLOWEST` bytes
SLOWEST = 2**14
# After an early reply the rest of the body is thrown away for so many seconds before the
# connection is closed, because a client that sends before it reads would lose the reply. So many
# bytes are read in a second: at full speed an endless body would take the processor from all texts.
LINGER, LEFT_A_SECOND = 8.0, 2**23


def too_large() -> BodyError:
    return BodyError(
        f"The body of the request has more than {MOST_BYTES} bytes. Send less.",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    )


async def received(request: Request) -> bytearray:
    """Receive a body; raises BodyError for one that is too large or too slow."""
    # Refused before a byte is read.
    if int(request.headers.get("content-length") or 0) > MOST_BYTES:
        raise too_large()
    body, begun = bytearray(), asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(PATIENCE) as limit:
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise too_large()
                limit.reschedule(begun + PATIENCE + len(body) / SLOWEST)
    except TimeoutError:
        words = f"The body of the request came too slowly: {len(body)} bytes so far."
        raise BodyError(words, status=HTTPStatus.REQUEST_TIMEOUT) from None
    return body


def closing_after_early_replies(app: ASGIApp) -> ASGIApp:
    """The application, whose replies to a body that has not come whole end the connection.

    The rest of the body is not kept, and a body without an end is not read for ever.
    """

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not has_body(scope):
            await app(scope, receive, send)
            return
        is_whole = False

        async def read() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole = is_whole or not message.get("more_body", False)
            return message

        async def throw_rest_away() -> None:
            while not is_whole:
                part = (await read()).get("body", b"")
                await asyncio.sleep(len(part) / LEFT_A_SECOND)

        async def answer(message: Message) -> None:
            if is_whole:
                pass
            elif message["type"] == "http.response.start":
                closing = [*message["headers"], (b"connection", b"close")]
                message = {**message, "headers": closing}
            elif not message.get("more_body", False):
                # The reply is complete for the client. The connection stays open until the rest is
                # read.
                await send({**message, "more_body": True})
                with suppress(TimeoutError):
                    await asyncio.wait_for(throw_rest_away(), LINGER)
                message = {"type": "http.response.body"}
            await send(message)

        await app(scope, read, answer)

    return served


def has_body(scope: dict[str, Any] | Scope) -> bool:
    """True for a request whose headers announce a body."""
    headers = dict(scope["headers"])
    length: bytes = headers.get(b"content-length", b"0")
    return b"transfer-encoding" in headers or length.strip(b"0 ") != b""
