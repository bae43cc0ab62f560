"""The application: requests in all protocols, over one engine."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec_mlx import errors
from specdec_mlx.errors import MissingPackageError, ModelFolderError
from specdec_mlx.server.access import guarded, keyed, origins_of
from specdec_mlx.server.engine import Engine
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.pictures import take_pictures
from specdec_mlx.server.protocols.body import SMALL, read_body
from specdec_mlx.server.protocols.chat import CHAT
from specdec_mlx.server.protocols.completions import COMPLETIONS
from specdec_mlx.server.protocols.messages import MESSAGES
from specdec_mlx.server.protocols.responses import RESPONSES
from specdec_mlx.server.receiving import LEFT_A_SECOND, closing_after_early_replies, received
from specdec_mlx.server.requests import (
    Asked,
    BodyError,
    Ended,
    Event,
    Failed,
    Object,
    PromptProgress,
    RequestError,
    UnavailableError,
    Wire,
    Written,
)
from specdec_mlx.server.status import METRICS_TYPE, Totals
from specdec_mlx.server.tickets import Ticket
from specdec_mlx.server.tokens import apply_template, detokenize, tokenize

LONG_READING = 2.0  # seconds after which the log says how far a prompt is read
PAUSE = 0.1  # seconds before a body that cannot be read is refused
LONG_PAUSE = 0.5  # seconds before a prompt that is too long is refused: it may be many megabytes
RETRY_SECONDS = "5"  # after which a request that was not served may be sent again
SILENCE = 5.0  # seconds without a byte after which a stream says that it lives
STREAM = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
WIRES: dict[str, Wire] = {
    "/chat/completions": CHAT,
    "/completions": COMPLETIONS,
    "/messages": MESSAGES,
    "/responses": RESPONSES,
}

TOKENS = {"/tokenize": tokenize, "/detokenize": detokenize, "/apply-template": apply_template}

VERSIONS = re.compile(r"^(/v1)+(?=/|$)")

Events = Sequence[tuple[int, Event]]  # with the index of their choice
NEWS = PromptProgress | Ended | Failed  # of a text as a whole


class HungUpError(ConnectionError):
    """The client has closed the connection."""


def make_app(engine: Engine, settings: ServerSettings) -> ASGIApp:
    """The application over an engine that has started."""
    app = keyed(Endpoints(engine, settings).app(), settings, no_access)
    with_headers = CORSMiddleware(
        app,
        allow_origin_regex=origins_of(settings).pattern,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
    )
    guarded_app = guarded(with_headers, settings, no_access)
    return closing_after_early_replies(with_paths(guarded_app))


def with_paths(app: ASGIApp) -> ASGIApp:
    """The application, whose paths are the same with /v1 before them and a slash at their end."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = VERSIONS.sub("", scope["path"].rstrip("/")) or "/"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await app(scope, receive, send)

    return served


class Endpoints:
    """The answers on each path."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine, self.settings, self.totals = engine, settings, Totals()
        self.large_body = asyncio.Lock()

    def app(self) -> Starlette:
        """The routes."""
        answers = {
            **dict.fromkeys(WIRES, self.answer),
            **dict.fromkeys(TOKENS, self.read_tokens),
            "/messages/count_tokens": self.count_tokens,
            "/models/unload": self.unload,
        }
        routes = [Route(path, told(answer), methods=["POST"]) for path, answer in answers.items()]
        routes += [
            Route("/", self.page),
            Route("/metrics", self.metrics),
            Route("/health", self.health),
            Route("/api/hello", told(self.hello)),
            Route("/responses", no_socket),
            Route("/models", told(self.models)),
            Route("/models/{name:path}", told(self.model)),
        ]
        return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})

    async def page(self, request: Request) -> Response:
        """The status page."""
        return HTMLResponse(self.totals.page(self.gauges()))

    async def metrics(self, request: Request) -> Response:
        """The totals for Prometheus."""
        return Response(self.totals.metrics(self.gauges()), media_type=METRICS_TYPE)

    def gauges(self) -> dict[str, int]:
        """Requests that are served, and that wait."""
        return {"running": self.engine.running, "waiting": self.engine.waiting}

    async def health(self, request: Request) -> Response:
        """200 while requests are served."""
        if self.engine.is_alive:
            return encoded({"status": "ok"})
        return encoded({"status": "unavailable"}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def hello(self, request: Request) -> Object:
        """The answer that some clients look for first."""
        return {"message": "hello"}

    async def models(self, request: Request) -> Object:
        """The models that may be named."""
        is_openai = wire_of(request) is CHAT
        listed = await run_in_threadpool(self.engine.models.listed)
        models = [listing(model, is_openai) for model in listed]
        if is_openai:
            return {"object": "list", "data": models}
        ids = [model["id"] for model in models]
        ends = {"first_id": ids[0], "last_id": ids[-1]} if ids else {}
        return {"data": models, "has_more": False, **ends}

    async def model(self, request: Request) -> Object:
        """The model on the path."""
        name = request.path_params["name"]
        model = await run_in_threadpool(self.engine.models.named, name)
        return listing(model, wire_of(request) is CHAT)

    async def unload(self, request: Request) -> Object:
        """Free the model's memory, once the texts that are written have ended."""
        await asyncio.wrap_future(self.engine.unload())
        return {"status": "ok"}

    async def count_tokens(self, request: Request) -> Object:
        """Tokens of a prompt, in Anthropic's protocol."""
        asked = await self.read(request, max_tokens=1)
        number = await run_in_threadpool(self.engine.num_tokens, asked.requests[0])
        return {"input_tokens": number}

    async def read_tokens(self, request: Request) -> Object:
        """Tokens of a text, or the text of tokens."""
        raw, answer = await received(request), TOKENS[request.scope["path"]]
        return await run_in_threadpool(lambda: answer(self.engine, read_body(raw)))

    async def answer(self, request: Request) -> Any:
        """The reply to a request for texts."""
        return Answer(self.engine, self.totals, wire_of(request), await self.read(request))

    async def read(self, request: Request, **more: Any) -> Asked:
        """Read the body; raises RequestError. Others do not wait for its grammar or pictures."""
        raw, wire = await received(request), wire_of(request)
        key = request.headers.get("authorization") or request.headers.get("x-api-key", "")

        def read() -> Asked:
            asked = wire.read({**self.settings.sampling, **more, **read_body(raw)})
            for one in asked.requests:
                one.key = key
                take_pictures(one, self.engine.models.can_see)
            return asked

        if (size := len(raw)) <= SMALL:
            return await run_in_threadpool(read)
        try:
            async with self.large_body:  # one at a time, so that no two are taken apart in memory
                return await run_in_threadpool(read)
        except Exception:
            await asyncio.sleep(size / LEFT_A_SECOND)  # others need not wait for this refusal
            raise


def told(answer: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
    """An endpoint whose objects are sent as JSON, and its errors in the form of the protocol."""

    async def endpoint(request: Request) -> Any:
        try:
            content = await answer(request)
        except Exception as error:
            return await refused_in_time(wire_of(request), error)
        return encoded(content) if isinstance(content, dict) else content

    return endpoint


class Inbox:
    """Events on their way from the engine's thread to the task of a connection.

    is_streamed: the task is woken for each piece of text, and not only for news of the whole.
    """

    def __init__(self, *, is_streamed: bool) -> None:
        self._is_streamed = is_streamed
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        self._events = deque[tuple[int, Event]]()
        self._is_woken = self._has_hung_up = False
        self._alarm: asyncio.TimerHandle | None = None

    def put(self, choice: int, event: Event) -> None:
        """Add an event, on any thread; the task is woken once for all that come meanwhile."""
        self._events.append((choice, event))
        if not self._is_woken and (self._is_streamed or isinstance(event, NEWS)):
            self._is_woken = True
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                self._loop.call_soon_threadsafe(self._ready.set)

    async def watch(self, receive: Receive) -> None:
        """Wait for the client to go."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._has_hung_up = True
        self._ready.set()

    async def take(self, until: float = math.inf) -> Events:
        """All events since the last time; none at times, and at a time of the loop's clock.

        Raises HungUpError once the client has gone.
        """
        if self._alarm is None and until < math.inf:  # one in a while, not one an event
            self._alarm = self._loop.call_at(until, self._ring)
        await self._ready.wait()
        if self._has_hung_up:
            raise HungUpError
        self._ready.clear()
        self._is_woken = False
        return [self._events.popleft() for _ in range(len(self._events))]

    def _ring(self) -> None:
        self._alarm = None
        self._ready.set()


class Answer:
    """One reply, whole or streamed; its texts end with the connection, and with each other."""

    def __init__(self, engine: Engine, totals: Totals, wire: Wire, asked: Asked) -> None:
        self.engine, self.totals, self.wire, self.asked = engine, totals, wire, asked
        self.num_open = len(asked.requests)
        self.began_at = monotonic()
        self.read_since: dict[int, float] = {}  # choice -> time
        self.ended: list[Ended] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the texts, and send them."""
        inbox = Inbox(is_streamed=self.asked.stream)
        tickets: list[Ticket] = []
        watch = asyncio.create_task(inbox.watch(receive))
        try:
            for choice, request in enumerate(self.asked.requests):
                tickets.append(self.engine.submit(request, partial(inbox.put, choice)))
            response = await (self.stream if self.asked.stream else self.whole)(inbox, send)
        except HungUpError:
            seconds = monotonic() - self.began_at
            logging.info(f"{self.asked.model}: client hung up after {seconds:.1f} s.")
            return
        except Exception as error:
            response = await refused_in_time(self.wire, error)
        finally:
            watch.cancel()
            for ticket in tickets:
                ticket.cancel()
        if response is not None:
            await response(scope, receive, send)

    async def whole(self, inbox: Inbox, send: Send) -> Response:
        """The reply once all is written."""
        texts = [Written() for _ in self.asked.requests]
        while self.num_open:
            for choice, event in self.counted(await inbox.take()):
                texts[choice].add(event)
        return encoded(self.wire.reply(self.asked, texts))

    async def stream(self, inbox: Inbox, send: Send) -> None:
        """Send events as they come; an error before the first is raised, and told in its place."""
        clock, stream = asyncio.get_running_loop().time, self.wire.stream(self.asked)
        events = self.counted(await inbox.take(clock() + SILENCE))
        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": STREAM})
        data, said_at = b"".join(stream.begin()), clock()
        try:
            while True:
                for choice, event in events:
                    data += b"".join(stream.write(choice, event))
                if not self.num_open:
                    break
                if not data and clock() - said_at >= SILENCE:
                    data = stream.keepalive()
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    data, said_at = b"", clock()
                events = self.counted(await inbox.take(said_at + SILENCE))
            data += b"".join(stream.end())
        except HungUpError:
            raise
        except Exception as error:
            data += b"".join(stream.fail(error, status_of(error)))
        await send({"type": "http.response.body", "body": data})

    def counted(self, events: Events) -> Events:
        """Count events, and log what they tell; raises the error of one that failed."""
        for choice, event in events:
            match event:
                case Failed():
                    raise event.error
                case PromptProgress():
                    since = self.read_since.setdefault(choice, monotonic())
                    if monotonic() - since > LONG_READING:
                        logging.info(f"Prompt: {event.done} of {event.total} tokens")
                case Ended():
                    self.num_open -= 1
                    self.totals.add(event)
                    self.ended.append(event)
                    if not self.num_open:
                        logging.info(account(self.ended, monotonic() - self.began_at))
        return events


def account(ended: Sequence[Ended], seconds: float) -> str:
    """A line about a request: its model, tokens read, reused and written, and the time it took."""
    reused = sum(text.num_cached for text in ended)
    read = sum(text.num_prompt for text in ended) - reused
    written = sum(text.num_written for text in ended)
    stats = [text.stats for text in ended if text.stats is not None]
    passes = sum(one.target_passes for one in stats)
    speed = sum(one.emitted for one in stats) / max(1, passes)
    return (
        f"{ended[0].model}: {read} tokens read, {reused} reused, {written} written, "
        f"{speed:.2f} a pass, {seconds:.1f} s"
    )


def encoded(content: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """A response in JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def refusal(wire: Wire, error: Exception) -> Response:
    """An error in the form of a protocol; logged."""
    status = status_of(error)
    logging.info(f"Refused with {status}: {error!s:.200}")
    response = encoded(wire.error(error, status), status)
    if isinstance(error, UnavailableError):
        response.headers["retry-after"] = RETRY_SECONDS
    error.__traceback__ = None  # its frames hold the request, and the error itself
    return response


async def refused_in_time(wire: Wire, error: Exception) -> Response:
    """A refusal; that of a body that cannot be read, or of too long a prompt, comes after a pause.

    A client that sends bodies without end or sense in a loop leaves the processor to the texts.
    """
    if isinstance(error, BodyError):
        await asyncio.sleep(PAUSE)
    elif isinstance(error, RequestError) and error.num_tokens:
        await asyncio.sleep(LONG_PAUSE)
    return refusal(wire, error)


def status_of(error: Exception) -> HTTPStatus:
    """The status of an error; one that is not the client's is logged.

    The client's are those that are named in `errors` and in `server.requests`.
    """
    if isinstance(error, UnavailableError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, ModelFolderError):
        return HTTPStatus.NOT_FOUND
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, ClientDisconnect):  # nobody reads the reply
        return HTTPStatus.BAD_REQUEST
    is_named = type(error).__module__ == errors.__name__
    if is_named and isinstance(error, ValueError | MissingPackageError):
        return HTTPStatus.BAD_REQUEST
    logging.error("A request failed.", exc_info=error)
    return HTTPStatus.INTERNAL_SERVER_ERROR


async def unknown(request: Request, error: Exception) -> Response:
    """The answer on a path, or to a method, that is none."""
    words = f"There is no {request.method} {request.scope['path']} here."
    status = HTTPStatus(getattr(error, "status_code", HTTPStatus.NOT_FOUND))
    response = refusal(wire_of(request), RequestError(words, status=status))
    response.headers.update(getattr(error, "headers", None) or {})
    return response


def no_access(scope: Scope, status: HTTPStatus, words: str) -> Response:
    """The answer to a request without the key, or of a foreign web page."""
    is_keyless = status == HTTPStatus.UNAUTHORIZED
    error = RequestError(words, "invalid_api_key" if is_keyless else None, status=status)
    response = refusal(wire_of(Request(scope)), error)
    if is_keyless:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def no_socket(request: Request) -> Response:
    """The answer to a client that would rather have a WebSocket: Codex then posts at once."""
    words = "Responses are posted here, and not asked for over a WebSocket."
    return refusal(RESPONSES, RequestError(words, status=HTTPStatus.UPGRADE_REQUIRED))


def wire_of(request: Request) -> Wire:
    """The protocol of a path, or of a client on a path that several protocols have."""
    path = request.scope["path"]
    is_anthropic = path.startswith("/messages") or "anthropic-version" in request.headers
    return WIRES.get(path, MESSAGES if is_anthropic else CHAT)


def listing(model: Object, is_openai: bool) -> Object:
    """A model in OpenAI's list, or in Anthropic's."""
    if is_openai:
        return {"object": "model", "owned_by": "specdec_mlx", **model}
    created = datetime.fromtimestamp(model["created"], UTC).isoformat()
    named = {"id": model["id"], "display_name": model["id"]}
    return {"type": "model", **named, "created_at": created}
