"""The application: requests in all protocols, over one engine."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec_mlx import errors
from specdec_mlx.errors import MissingPackageError, ModelFolderError
from specdec_mlx.server.access import foreign_site_error, missing_key_error, origins_of
from specdec_mlx.server.engine import Engine
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.pictures import take_pictures
from specdec_mlx.server.protocols.body import SMALL, read_body
from specdec_mlx.server.protocols.chat import CHAT
from specdec_mlx.server.protocols.completions import COMPLETIONS
from specdec_mlx.server.protocols.messages import MESSAGES
from specdec_mlx.server.protocols.replies import ParsedBody, Wire
from specdec_mlx.server.protocols.responses import RESPONSES
from specdec_mlx.server.receiving import LEFT_A_SECOND, closing_after_early_replies, received
from specdec_mlx.server.requests import (
    BodyError,
    Ended,
    Event,
    Failed,
    Object,
    PromptProgress,
    RequestError,
    Transcript,
    UnavailableError,
)
from specdec_mlx.server.served_requests import Ticket
from specdec_mlx.server.status import METRICS_TYPE, Totals
from specdec_mlx.server.tokens import apply_template, detokenize, tokenize

LONG_READING = 2.0  # seconds after which the log says how far a prompt is read
PAUSE = 0.1  # seconds before a body that cannot be read is refused
LONG_PAUSE = 0.5  # seconds before a prompt that is too long is refused: it may be many megabytes
SILENCE = 5.0  # seconds without a byte after which a stream says that it lives
STREAM_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
REFUSAL_HEADERS = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
    HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": "5"},
}
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
    app = guarded(Endpoints(engine, settings).app(), partial(missing_key_error, settings))
    with_headers = CORSMiddleware(
        app,
        allow_origin_regex=origins_of(settings).pattern,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
    )
    app = guarded(with_headers, partial(foreign_site_error, settings))
    return closing_after_early_replies(with_paths(app))


def with_paths(app: ASGIApp) -> ASGIApp:
    """The application, whose paths are the same with /v1 before them and a slash at their end."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = VERSIONS.sub("", scope["path"].rstrip("/")) or "/"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await app(scope, receive, send)

    return served


def guarded(app: ASGIApp, find_error: Callable[[Scope], RequestError | None]) -> ASGIApp:
    """The application, which answers only requests in which no error is found."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        error = find_error(scope) if scope["type"] == "http" else None
        answer = app if error is None else refusal(wire_of(Request(scope)), error)
        await answer(scope, receive, send)

    return served


class Endpoints:
    """The answers on each path."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine, self.settings, self.totals = engine, settings, Totals()
        self.large_body = asyncio.Lock()

    def app(self) -> Starlette:
        posts = {
            **dict.fromkeys(WIRES, self.answer),
            **dict.fromkeys(TOKENS, self.read_tokens),
            "/messages/count_tokens": self.count_tokens,
            "/models/unload": self.unload,
        }
        gets = {
            "/": self.page,
            "/metrics": self.metrics,
            "/health": self.health,
            "/api/hello": self.hello,
            "/responses": self.refuse_socket,
            "/models": self.models,
            "/models/{name:path}": self.model,
        }
        routes = [Route(path, answer, methods=["POST"]) for path, answer in posts.items()]
        routes += [Route(path, answer) for path, answer in gets.items()]
        # starlette raises an error again that its own handler for `Exception` has answered
        answering = Middleware(ExceptionMiddleware, handlers={Exception: answer_error})
        handlers: Any = {HTTPException: answer_unknown}
        return Starlette(routes=routes, middleware=[answering], exception_handlers=handlers)

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self.totals.page(self.gauges()))

    async def metrics(self, request: Request) -> Response:
        return Response(self.totals.metrics(self.gauges()), media_type=METRICS_TYPE)

    def gauges(self) -> dict[str, int]:
        engine = self.engine
        cached = engine.prefixes.nbytes
        return {"running": engine.running, "waiting": engine.waiting, "cached": cached}

    async def health(self, request: Request) -> Response:
        """200 while requests are served."""
        if self.engine.is_alive:
            return json_response({"status": "ok"})
        return json_response({"status": "unavailable"}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def hello(self, request: Request) -> Response:
        """The answer that some clients look for first."""
        return json_response({"message": "hello"})

    async def refuse_socket(self, request: Request) -> Response:
        """Refuse a client that would rather have a WebSocket: Codex then posts at once."""
        words = "Responses are posted here, and not asked for over a WebSocket."
        raise RequestError(words, status=HTTPStatus.UPGRADE_REQUIRED)

    async def models(self, request: Request) -> Response:
        models = await run_in_threadpool(self.engine.models.listed)
        entries = [model_entry(request, model) for model in models]
        if wire_of(request) is CHAT:
            return json_response({"object": "list", "data": entries})
        ids = [model["id"] for model in models]
        first_and_last = {"first_id": ids[0], "last_id": ids[-1]} if ids else {}
        return json_response({"data": entries, "has_more": False, **first_and_last})

    async def model(self, request: Request) -> Response:
        model = await run_in_threadpool(self.engine.models.find_entry, request.path_params["name"])
        return json_response(model_entry(request, model))

    async def unload(self, request: Request) -> Response:
        """Free the model's memory, once the texts that are written have ended."""
        await asyncio.wrap_future(self.engine.unload())
        return json_response({"status": "ok"})

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a prompt, in Anthropic's protocol."""
        parsed = await self.read(request, max_tokens=1)
        number = await run_in_threadpool(self.engine.num_tokens, parsed.requests[0])
        return json_response({"input_tokens": number})

    async def read_tokens(self, request: Request) -> Response:
        """Answer with the tokens of a text, or the text of tokens."""
        raw, answer = await received(request), TOKENS[request.scope["path"]]
        content = await run_in_threadpool(lambda: answer(self.engine, read_body(raw)))
        return json_response(content)

    async def answer(self, request: Request) -> Any:
        return Answer(self.engine, self.totals, wire_of(request), await self.read(request))

    async def read(self, request: Request, **more: Any) -> ParsedBody:
        """Read the body; raises RequestError. Others do not wait for its grammar or pictures."""
        raw, wire = await received(request), wire_of(request)
        key = request.headers.get("authorization") or request.headers.get("x-api-key", "")

        def parse() -> ParsedBody:
            parsed = wire.read({**self.settings.sampling, **more, **read_body(raw)})
            for text_request in parsed.requests:
                text_request.key = key
                take_pictures(text_request, self.engine.models.can_see)
            return parsed

        if (size := len(raw)) <= SMALL:
            return await run_in_threadpool(parse)
        try:
            async with self.large_body:  # one at a time, so that no two are taken apart in memory
                return await run_in_threadpool(parse)
        except Exception:
            await asyncio.sleep(size / LEFT_A_SECOND)  # others need not wait for this refusal
            raise


class Inbox:
    """Events on their way from the engine's thread to the task of a connection.

    Args:
        is_streamed: the task wakes for each piece of text, and not only for news of the whole text.
    """

    def __init__(self, *, is_streamed: bool) -> None:
        self._is_streamed = is_streamed
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        # A deque needs no lock: the engine only appends, and the task only pops.
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
        # Cleared before the events are taken, so that a later event wakes the task again.
        self._ready.clear()
        self._is_woken = False
        # A fixed number, because the engine may append without end.
        return [self._events.popleft() for _ in range(len(self._events))]

    def _ring(self) -> None:
        self._alarm = None
        self._ready.set()


class Answer:
    """One reply, whole or streamed; its texts end with the connection, and with each other.

    An error before the first byte is raised.
    """

    def __init__(self, engine: Engine, totals: Totals, wire: Wire, parsed: ParsedBody) -> None:
        self.engine, self.totals, self.wire, self.parsed = engine, totals, wire, parsed
        self.num_open = len(parsed.requests)
        self.began_at = monotonic()
        self.read_since: dict[int, float] = {}  # choice -> time
        self.ended: list[Ended] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inbox = Inbox(is_streamed=self.parsed.stream)
        tickets: list[Ticket] = []
        watch = asyncio.create_task(inbox.watch(receive))
        try:
            for choice, request in enumerate(self.parsed.requests):
                tickets.append(self.engine.submit(request, partial(inbox.put, choice)))
            if self.parsed.stream:
                await self.stream(inbox, send)
            else:
                response = await self.build_response(inbox)
                await response(scope, receive, send)
        except HungUpError:
            seconds = monotonic() - self.began_at
            logging.info(f"{self.parsed.model}: client hung up after {seconds:.1f} s.")
        finally:
            # After an error too: texts without a reader would take the engine's time.
            watch.cancel()
            for ticket in tickets:
                ticket.cancel()

    async def build_response(self, inbox: Inbox) -> Response:
        texts = [Transcript() for _ in self.parsed.requests]
        while self.num_open:
            for choice, event in self.counted(await inbox.take()):
                texts[choice].add(event)
        return json_response(self.wire.reply(self.parsed).build(texts))

    async def stream(self, inbox: Inbox, send: Send) -> None:
        """Send events as they come; the error after the first is the stream's last event."""
        clock, reply = asyncio.get_running_loop().time, self.wire.reply(self.parsed)
        # Before the first byte an error can still have a status of its own.
        events = self.counted(await inbox.take(clock() + SILENCE))
        start = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
        await send(start)
        data, sent_at = b"".join(reply.begin()), clock()
        try:
            while True:
                for choice, event in events:
                    data += b"".join(reply.write(choice, event))
                if not self.num_open:
                    break
                if not data and clock() - sent_at >= SILENCE:
                    data = reply.keepalive()
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    data, sent_at = b"", clock()
                events = self.counted(await inbox.take(sent_at + SILENCE))
            data += b"".join(reply.end())
        except HungUpError:
            raise
        except Exception as error:
            data += b"".join(reply.fail(error, status_of(error)))
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
    num_reused = sum(text.num_cached for text in ended)
    num_read = sum(text.num_prompt for text in ended) - num_reused
    num_written = sum(text.num_written for text in ended)
    stats = [text.stats for text in ended if text.stats is not None]
    passes = sum(text_stats.target_passes for text_stats in stats)
    speed = sum(text_stats.emitted for text_stats in stats) / max(1, passes)
    return (
        f"{ended[0].model}: {num_read} tokens read, {num_reused} reused, {num_written} written, "
        f"{speed:.2f} a pass, {seconds:.1f} s"
    )


def json_response(content: Any, status: HTTPStatus = HTTPStatus.OK, **more: Any) -> Response:
    """A response in JSON. more: arguments of `Response`."""
    content = msgspec.json.encode(content)
    return Response(content, status, media_type="application/json", **more)


def refusal(wire: Wire, error: Exception) -> Response:
    """An error in the form of a protocol; logged."""
    status = status_of(error)
    logging.info(f"Refused with {status}: {error!s:.200}")
    headers = REFUSAL_HEADERS.get(status)
    return json_response(wire.error(error, status), status, headers=headers)


async def answer_error(request: Request, error: Exception) -> Response:
    """The answer to a body that cannot be read, or to too long a prompt, comes after a pause.

    A client that sends bodies without end or sense in a loop leaves the processor to the texts.
    """
    if isinstance(error, BodyError):
        await asyncio.sleep(PAUSE)
    elif isinstance(error, RequestError) and error.num_tokens:
        await asyncio.sleep(LONG_PAUSE)
    return refusal(wire_of(request), error)


async def answer_unknown(request: Request, error: HTTPException) -> Response:
    """The answer on a path, or to a method, that is none."""
    words = f"There is no {request.method} {request.scope['path']} here."
    unknown = RequestError(words, status=HTTPStatus(error.status_code))
    response = refusal(wire_of(request), unknown)
    response.headers.update(error.headers or {})
    return response


def status_of(error: Exception) -> HTTPStatus:
    """The status of an error; one that is not the client's is logged.

    The client's are those that are named in `errors` and in `server.requests`.
    """
    is_named = type(error).__module__ == errors.__name__
    match error:
        case RequestError():
            return error.status
        case UnavailableError():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case ModelFolderError():
            return HTTPStatus.NOT_FOUND
        case ClientDisconnect():  # nobody reads the reply
            return HTTPStatus.BAD_REQUEST
        case ValueError() | MissingPackageError() if is_named:
            return HTTPStatus.BAD_REQUEST
    logging.error("A request failed.", exc_info=error)
    return HTTPStatus.INTERNAL_SERVER_ERROR


def wire_of(request: Request) -> Wire:
    """The protocol of a path, or of a client on a path that several protocols have."""
    path = request.scope["path"]
    is_anthropic = path.startswith("/messages") or "anthropic-version" in request.headers
    return WIRES.get(path, MESSAGES if is_anthropic else CHAT)


def model_entry(request: Request, model: Object) -> Object:
    if wire_of(request) is CHAT:
        return {"object": "model", "owned_by": "specdec_mlx", **model}
    created = datetime.fromtimestamp(model["created"], UTC).isoformat()
    name = model["id"]
    return {"type": "model", "id": name, "display_name": name, "created_at": created}
