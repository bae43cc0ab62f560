"""One connection to the server: reads what a request says, and answers, errors included."""

from __future__ import annotations

import io
import json
import logging
import socket
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from mlx_lm.server import APIHandler

from specdec_mlx.errors import MissingPackageError, ModelFolderError
from specdec_mlx.mlx_lm_plugin.channel import ServerEndingError
from specdec_mlx.mlx_lm_plugin.choices import Choice, ChoiceEndedError, Choices, Usage
from specdec_mlx.mlx_lm_plugin.openai_fields import (
    RequestError,
    check_messages,
    is_clients,
    prompts_in,
    read_body,
)
from specdec_mlx.mlx_lm_plugin.requests import Menu, Requested

LONGEST_ANSWER = 1000
"""Most characters of an error's words: some repeat what the client sent."""


class Refused(Exception):  # noqa: N818 - no ValueError: mlx-lm would answer that one itself
    """A request is not served, for a reason."""

    def __init__(self, reason: Exception) -> None:
        """Keep the reason, which the client is told."""
        super().__init__(str(reason))
        self.reason = reason


class SpeculatingHandler(APIHandler):  # type: ignore[misc]
    """Reads what a request says about speculation, and adds the account to its reply.

    Whatever goes wrong with a request is said to its client in OpenAI's form, as HTTP 400 or, where
    that is no fault of the request, 500; where a stream has begun, as its last event before [DONE].
    """

    speculation: Requested | None = None
    replying = False
    """Whether the client has the head of a reply."""
    choice: Choice | None = None
    """Which of several choices it answers with; the connection is another handler's then."""

    def __init__(self, menu: Menu, *args: Any, **kwargs: Any) -> None:
        """Handle one connection; the base class does it all in its constructor."""
        self.menu = menu
        super().__init__(*args, **kwargs)

    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        """Answer a request; a client that hangs up is no error of ours."""
        self.speculation, self.replying = None, False
        try:
            self._answer()
        except ConnectionError as error:
            logging.info(f"Client hung up: {error}")
            self.close_connection = True

    def _answer(self) -> None:
        try:
            self._read_body()
            super().do_POST()
        except ConnectionError:
            raise
        except Refused as error:
            self._refuse(error.reason)
        except Exception as error:
            if self._status(error) == HTTPStatus.INTERNAL_SERVER_ERROR:
                logging.exception("A request failed.")
            self._refuse(error)

    def _read_body(self) -> None:
        """Read and check the body of a request, and leave to mlx-lm what is to be read of it."""
        size = self.headers.get("Content-Length", "")
        if size.isdecimal() and self.path.endswith("completions"):
            try:
                body = json.dumps(read_body(self.rfile.read(int(size)))).encode()
            except RequestError as error:
                raise Refused(error) from error
            self.headers.replace_header("Content-Length", str(len(body)))
            self.rfile: Any = io.BytesIO(body)

    def check_client(self) -> None:
        """Raise ConnectionError if the client has gone, or waits for no more of this choice."""
        if self.choice is not None and self.choice.choices.failure is not None:
            raise ChoiceEndedError("Another choice has ended the request.")
        try:
            gone = not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if gone:
            raise ConnectionResetError("The connection was closed.")

    def end_headers(self) -> None:
        """Send the head of a reply."""
        if self.choice is None:
            super().end_headers()
        self.replying = True

    def send_header(self, keyword: str, value: str) -> None:
        """Add to the head of a reply."""
        if self.choice is None:
            super().send_header(keyword, value)

    def send_response(self, code: int, message: str | None = None) -> None:
        """Begin the head of a reply."""
        if self.choice is None:
            super().send_response(code, message)

    def _set_completion_headers(self, status_code: int = HTTPStatus.OK) -> None:
        """Begin a reply, unless the request turned out to be one that cannot be served."""
        if self.speculation is not None and self.speculation.error is not None:
            raise Refused(self.speculation.error)
        super()._set_completion_headers(status_code)

    def _refuse(self, error: Exception) -> None:
        """Say what went wrong, in the place of a reply or at the end of one."""
        status = self._status(error)
        is_ours = status == HTTPStatus.INTERNAL_SERVER_ERROR
        words = f"{type(error).__name__}: {error}" if is_ours else str(error)
        kind = (
            "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        )
        said = {"message": words[:LONGEST_ANSWER], "type": kind, "code": status}
        reply = json.dumps({"error": said})
        self.speculation = None
        if not self.replying:
            self._headers_buffer: list[bytes] = []  # of the reply that there will not be
            self._set_completion_headers(status)
            self.end_headers()
            self.wfile.write(reply.encode())
        elif self.stream:
            self.wfile.write(f"data: {reply}\n\ndata: [DONE]\n\n".encode())
        self.close_connection = True

    def _status(self, error: Exception) -> HTTPStatus:
        """What an error is in HTTP's terms."""
        if isinstance(error, ServerEndingError) or not self.response_generator.is_healthy:
            return HTTPStatus.SERVICE_UNAVAILABLE
        if isinstance(error, ModelFolderError):
            return HTTPStatus.NOT_FOUND
        return HTTPStatus.BAD_REQUEST if is_clients(error) else HTTPStatus.INTERNAL_SERVER_ERROR

    def validate_model_parameters(self) -> None:
        """Raise Refused for what is wrong in the request."""
        try:
            super().validate_model_parameters()
            if self.path.endswith("/chat/completions"):
                check_messages(self.body.get("messages"))
            else:
                prompts_in(self.body.get("prompt"))
            self.speculation = self.menu.requested(self.body, self.headers.get("Authorization", ""))
        except (ValueError, MissingPackageError) as error:
            raise Refused(RequestError(str(error))) from error
        if not (self.body.get("stream_options") or {}).get("include_usage"):
            self.stream_options = None  # mlx-lm looks for the word without asking

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        """Answer, with several choices if they are asked for."""

        def answer(handler: SpeculatingHandler, own: Any) -> None:
            assert handler.speculation is not None
            own.speculation = handler.speculation
            own.speculation.check_client = handler.check_client
            APIHandler.handle_completion(handler, own, stop_words)

        num_choices = self.body.get("n", 1)
        requests = [request]
        if request.request_type == "text":
            requests = [replace(request, prompt=prompt) for prompt in prompts_in(request.prompt)]
        if len(requests) * num_choices == 1:
            answer(self, requests[0])
        else:
            Choices(self, answer, num_choices).run(requests)

    def account(self) -> dict[str, Any]:
        """The `speculation` object of what was answered."""
        assert self.speculation is not None
        return self.speculation.usage()

    def generate_response(
        self, text: str, finish_reason: str | None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """mlx-lm's reply or chunk of one; the account is in `usage`, or in the last chunk."""
        reply: dict[str, Any] = super().generate_response(text, finish_reason, *args, **kwargs)
        if self.choice is not None:
            reply["choices"][0]["index"] = self.choice.index
        if "usage" in reply:
            reply["usage"]["speculation"] = self.account()
        elif finish_reason is not None:
            reply["speculation"] = self.account()
        return reply

    def completion_usage_response(
        self,
        prompt_token_count: int | None = None,
        completion_token_count: int | None = None,
        prompt_cache_count: int | None = None,
    ) -> dict[str, Any]:
        """The last chunk of a stream whose client asked for the usage."""
        counts = prompt_token_count or 0, completion_token_count or 0, prompt_cache_count
        if self.choice is not None:
            self.choice.usage = Usage(*counts)
        reply: dict[str, Any] = super().completion_usage_response(*counts)
        reply["usage"]["speculation"] = self.account()
        return reply
