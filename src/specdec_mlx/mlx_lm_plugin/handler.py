"""A connection to the server: requests in two protocols, answers, several choices, and errors."""

from __future__ import annotations

import copy
import io
import json
import logging
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from threading import Lock
from types import SimpleNamespace
from typing import Any

from mlx_lm.server import APIHandler, CompletionRequest, ResponseGenerator

from specdec_mlx.errors import MissingPackageError, ModelFolderError
from specdec_mlx.mlx_lm_plugin import messages, openai_fields, status
from specdec_mlx.mlx_lm_plugin.openai_fields import Refused, RequestError, prompts_in
from specdec_mlx.mlx_lm_plugin.requests import Channel, Menu, ServerEndingError

DATA, DONE = b"data: ", b"[DONE]"


@dataclass(eq=False)
class Choice:
    """One of several choices, and the file that its handler writes to.

    reply: the whole of it, or of a stream the part with the usage.
    """

    choices: Choices
    index: int
    handler: SpeculatingHandler
    reply: dict[str, Any] | None = None

    def check_wanted(self) -> None:
        """Raise ConnectionError if another one has failed."""
        if self.choices.failure is not None:
            raise ConnectionError("Another choice has ended the request.")

    def write(self, data: bytes) -> int:
        """Take a whole reply, or a part of a stream, but not its end."""
        self.check_wanted()
        is_chunk = data.startswith(DATA) and not data.startswith(DATA + DONE)
        part = json.loads(data.removeprefix(DATA)) if is_chunk or not self.handler.stream else {}
        if "usage" in part:
            self.reply = part
        elif is_chunk or not data.startswith(DATA):
            self.choices.send_part(data, part)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


@dataclass(eq=False)
class Choices:
    """All choices of a request, `num_choices` of each prompt; `answer` answers one of them.

    Each has a copy of the handler, and a thread; chunks of a stream come as they are written.
    """

    handler: SpeculatingHandler
    answer: Callable[[SpeculatingHandler, Any], None]
    num_choices: int
    failure: BaseException | None = None
    parts: list[Choice] = field(default_factory=list)
    _lock: Any = field(default_factory=Lock)

    def run(self, requests: Sequence[Any]) -> None:
        """Answer all requests; raises what the first choice that failed raised."""
        own = [copy.deepcopy(request) for request in requests for _ in range(self.num_choices)]
        self.parts = [self._part(index) for index in range(len(own))]
        with ThreadPoolExecutor(len(own)) as pool:
            pool.map(self._run_one, self.parts, own)
        if self.failure is not None:
            raise self.failure
        replies = [part.reply for part in self.parts if part.reply is not None]
        if self.handler.stream:
            self._end(replies)
        else:
            self.handler.reply_json(self._whole(replies))

    def send_part(self, data: bytes, part: dict[str, Any]) -> None:
        """Send a part of a stream, or a line that keeps the connection alive."""
        self.send(data)

    def _end(self, replies: Sequence[dict[str, Any]]) -> None:
        """End a stream, with the usage if it was asked for."""
        if replies:
            self.send(DATA + json.dumps(self._whole(replies)).encode() + b"\n\n")
        self.send(DATA + DONE + b"\n\n")

    def _part(self, index: int) -> Choice:
        """A choice, with a handler, an account and a seed of its own."""
        handler = copy.copy(self.handler)
        part = Choice(self, index, handler)
        handler.speculation = replace(handler.speculation)
        handler.choice, handler.wfile, handler._headers_buffer = part, part, []
        if handler.seed is not None:
            handler.seed = (handler.seed + index % self.num_choices) % openai_fields.NUM_SEEDS
        return part

    def _run_one(self, part: Choice, request: Any) -> None:
        try:
            self.answer(part.handler, request)
        except (Exception, Refused) as error:
            with self._lock:
                self.failure = self.failure or error

    def send(self, data: bytes) -> None:
        """Send a reply, or a part of a stream, the first one after the head of the reply."""
        with self._lock:
            if not self.handler.replying:
                self.handler._set_stream_headers(200)
                self.handler.end_headers()
            self.handler.wfile.write(data)
            self.handler.wfile.flush()

    def _whole(self, replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One of all replies: a prompt is counted once, and cached tokens of the first."""
        choices = [choice for reply in replies for choice in reply["choices"]]
        usages = [reply["usage"] for reply in replies]
        usage = dict(usages[0])
        usage["prompt_tokens"] = sum(one["prompt_tokens"] for one in usages[:: self.num_choices])
        usage["completion_tokens"] = sum(one["completion_tokens"] for one in usages)
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        accounts = [one["speculation"] for one in usages]
        batched = any(account["batched"] for account in accounts)
        name = accounts[0]["drafter"]
        usage["speculation"] = {"drafter": name, "batched": batched, "choices": accounts}
        details = [one["completion_tokens_details"] for one in usages]
        usage["completion_tokens_details"] = {
            name: sum(one[name] for one in details) for name in details[0]
        }
        return {**replies[0], "choices": choices, "usage": usage}


@dataclass(eq=False)
class AsMessage(Choices):
    """The one answer to a request in Anthropic's protocol."""

    def __post_init__(self) -> None:
        asked = self.handler.asked or {}
        self.reply = messages.Reply(str(asked.get("model", "")), self._stopped_by, self._counts)

    @property
    def _channel(self) -> Channel:
        channel: Channel = self.parts[0].handler.speculation.channel
        return channel

    def _stopped_by(self) -> str | None:
        decode = self.handler.response_generator.model_provider.tokenizer.decode
        text = decode(self._channel.tokens)
        return messages.stop_in(text, (self.handler.asked or {}).get("stop_sequences"))

    def _counts(self) -> dict[str, int]:
        context = self._channel.context
        assert context is not None
        return messages.prompt_usage(len(context.prompt), max(0, context.prompt_cache_count))

    def send_part(self, data: bytes, part: dict[str, Any]) -> None:
        """Send the events of a part of a stream."""
        for event in self.reply.events(part) if part else [data]:
            self.send(event)

    def _end(self, replies: Sequence[dict[str, Any]]) -> None:
        for event in self.reply.end(replies[0]["usage"]):
            self.send(event)

    def _whole(self, replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self.reply.whole(replies[0])


class SpeculatingHandler(APIHandler):  # type: ignore[misc]
    """mlx-lm's handler, with speculation, several choices, and errors in OpenAI's form."""

    path: str
    speculation: Any = None  # a `Requested`, once the body is read
    replying = False  # true if the client has the head of a reply
    choice: Choice | None = None  # of several; another handler writes to the client
    asked: dict[str, Any] | None = None  # the body of a request in Anthropic's protocol

    def __init__(self, menu: Menu, totals: status.Totals, *args: Any, **kwargs: Any) -> None:
        """Handle one connection; the base class does it all in its constructor."""
        self.menu, self.totals = menu, totals
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        """The page and the metrics; all else is mlx-lm's."""
        generator = self.response_generator
        running = sum(channel.alive for channel in list(generator.channels))
        gauges = {"running": running, "waiting": generator.requests.qsize()}
        if self.path == status.METRICS:
            self._reply(self.totals.metrics(gauges), status.METRICS_TYPE)
        elif self.path == status.PAGE:
            self._reply(self.totals.page(gauges), "text/html; charset=utf-8")
        else:
            super().do_GET()

    def _reply(self, text: str, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        """Answer a request; a client that hangs up is no error of ours."""
        self.speculation, self.replying, self.asked = None, False, None
        try:
            try:
                if not self._read_body():
                    super().do_POST()
            except ConnectionError:
                raise
            except Refused as refused:
                self._refuse(refused.args[0])
            except Exception as error:
                self._refuse(error)
        except ConnectionError as error:
            logging.info(f"Client hung up: {error}")
            self.close_connection = True

    def _read_body(self) -> bool:
        """Check the body of a request, and leave to mlx-lm what it is to read; True if answered."""
        size, path = self.headers.get("Content-Length", ""), self.path.partition("?")[0]
        in_messages = path in (messages.MESSAGES, messages.COUNT_TOKENS)
        if not size.isdecimal() or not (in_messages or path.endswith("completions")):
            return False
        raw = self.rfile.read(int(size))
        if in_messages:
            self.asked = {}  # errors are in its form from here on
            self.asked, self.path = openai_fields.read_body(raw), messages.CHAT
            counting = path == messages.COUNT_TOKENS
            chat = messages.chat_body(self.asked, counting=counting)
            raw = json.dumps(chat).encode()
            if counting:
                self.reply_json({"input_tokens": self._num_tokens(chat)})
                return True
        body = json.dumps(openai_fields.read_body(raw)).encode()
        self.headers.replace_header("Content-Length", str(len(body)))
        self.rfile: Any = io.BytesIO(body)
        return False

    def _num_tokens(self, chat: dict[str, Any]) -> int:
        """Number of tokens of a chat's prompt."""
        generator = self.response_generator
        if (tokenizer := generator.model_provider.tokenizer) is None:
            raise RequestError("No model is loaded yet. Ask for a message first.")
        request = CompletionRequest("chat", "", chat["messages"], chat.get("tools"), None)
        args = SimpleNamespace(chat_template_kwargs=chat.get("chat_template_kwargs"))
        try:
            return len(ResponseGenerator._tokenize(generator, tokenizer, request, args)[0])
        except Exception as error:  # of the template, which is a program
            raise RequestError(f"The prompt cannot be read: {error}") from error

    def reply_json(self, reply: dict[str, Any]) -> None:
        """Send a whole reply."""
        whole = json.dumps(reply).encode()
        self._set_completion_headers(200)
        self.send_header("Content-Length", str(len(whole)))
        self.end_headers()
        self.wfile.write(whole)
        self.wfile.flush()

    def check_client(self) -> None:
        """Raise ConnectionError if the client has gone, or waits for no more of this choice."""
        if self.choice is not None:
            self.choice.check_wanted()
        try:
            gone = not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if gone:
            raise ConnectionResetError("The connection was closed.")

    def flush_headers(self) -> None:
        """Send the head of a reply; that of one of several choices is dropped."""
        self.replying = True
        if self.choice is None:
            super().flush_headers()

    def _refuse(self, error: Exception) -> None:
        """Say what went wrong, in the place of a reply or at the end of one."""
        status = self._status(error)
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            logging.error("A request failed.", exc_info=error)
        form = openai_fields.error_object if self.asked is None else messages.message_error
        reply = json.dumps(form(error, status))
        self.close_connection = True
        if not self.replying:
            self._headers_buffer: list[bytes] = []  # of the reply that there will not be
            self._set_completion_headers(status)
            self.end_headers()
            self.wfile.write(reply.encode())
        elif self.stream and self.asked is not None:
            self.wfile.write(f"event: error\ndata: {reply}\n\n".encode())
        elif self.stream:
            self.wfile.write(f"data: {reply}\n\ndata: [DONE]\n\n".encode())

    def _status(self, error: Exception) -> HTTPStatus:
        if isinstance(error, ServerEndingError) or not self.response_generator.is_healthy:
            return HTTPStatus.SERVICE_UNAVAILABLE
        if isinstance(error, ModelFolderError):
            return HTTPStatus.NOT_FOUND
        is_clients = openai_fields.is_clients(error)
        return HTTPStatus.BAD_REQUEST if is_clients else HTTPStatus.INTERNAL_SERVER_ERROR

    def validate_model_parameters(self) -> None:
        """Raise Refused for what is wrong in the request."""
        try:
            super().validate_model_parameters()
            if self.path.endswith("/chat/completions"):
                openai_fields.check_messages(self.body.get("messages"))
            else:
                prompts_in(self.body.get("prompt"))
            key = self.headers.get("Authorization") or self.headers.get("x-api-key", "")
            self.speculation = self.menu.requested(self.body, key)
        except (ValueError, MissingPackageError) as error:
            raise Refused(RequestError(str(error))) from error
        if not (self.body.get("stream_options") or {}).get("include_usage"):
            self.stream_options = None  # mlx-lm looks for the word without asking

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        """Answer, with several choices if they are asked for."""

        def answer(handler: SpeculatingHandler, own: Any) -> None:
            own.speculation = handler.speculation
            own.speculation.check_client = handler.check_client
            APIHandler.handle_completion(handler, own, stop_words)
            self.totals.add(handler.speculation)

        num_choices = self.body.get("n", 1)
        requests = [request]
        if request.request_type == "text":
            requests = [replace(request, prompt=prompt) for prompt in prompts_in(request.prompt)]
        if self.asked is not None:
            AsMessage(self, answer, 1).run(requests)
        elif len(requests) * num_choices == 1:
            answer(self, requests[0])
        else:
            Choices(self, answer, num_choices).run(requests)

    def account(self) -> dict[str, Any]:
        """Fields of the usage of what was answered, in OpenAI's names and in ours."""
        stats = self.speculation.stats
        accepted = stats.accepted if stats is not None else 0
        rejected = stats.drafted - accepted if stats is not None else 0
        names = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return {"completion_tokens_details": names, "speculation": self.speculation.usage()}

    def generate_response(self, text: str, reason: str | None, *args: Any, **kwargs: Any) -> Any:
        """mlx-lm's reply or chunk of one; the account is in `usage`, or in the last chunk."""
        reply = super().generate_response(text, reason, *args, **kwargs)
        if self.choice is not None:
            reply["choices"][0]["index"] = self.choice.index
        if "usage" in reply:
            reply["usage"] |= self.account()
        elif reason is not None:
            reply |= {"speculation": self.account()["speculation"]}
        return reply

    def completion_usage_response(self, *counts: Any) -> Any:
        """The last chunk of a stream whose client asked for the usage."""
        reply = super().completion_usage_response(*counts)
        reply["usage"] |= self.account()
        return reply
