"""Connections of the server: the bounds of what comes before the body of a request."""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from http import HTTPStatus

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specdec_mlx.server.requests import BodyError

MOST_BYTES = 2**16  # of a request's line and headers
PATIENCE = 30.0  # seconds in which they have to come


class BoundedConnection(HttpToolsProtocol):
    """A connection that is closed where headers are too large, too slow or without a host.

    A request that asks for another protocol than WebSocket is served as if it did not ask. Java's
    own client asks for HTTP/2 in the first request of each connection.

    Source: RFC 9112, section 3.2, of the host; RFC 6585, section 5, of their size; RFC 9110,
    section 7.8, of other protocols.
    """

    _timer: TimerHandle | None = None
    _num_bytes = 0  # of line and headers that have not come whole
    _refusal: BodyError | None = None
    _is_asking = False  # for another protocol

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; what has come of line and headers is counted."""
        was_waiting = self._timer is not None
        self._unset_keepalive_if_required()
        try:
            unread = data
            while unread:
                unread = self._read(unread)
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if was_waiting and self._timer is not None:
            self._num_bytes += len(data)
            if self._num_bytes > MOST_BYTES:
                self._refuse(too_large())

    def _read(self, data: bytes) -> bytes:
        """Parse data. Returns what to parse next: a request that asked for another protocol."""
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            if self._is_asking:
                # The parser has ended at the headers, and took no body.
                return self._plain_head() + data[upgrade.args[0] :]
            if self._should_upgrade():
                self.handle_websocket_upgrade()
        return b""

    def _plain_head(self) -> bytes:
        """Line and headers of the request without the other protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        left_out = b"connection", b"upgrade"
        lines += [b"%s: %s" % header for header in self.headers if header[0] not in left_out]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        """Look at them, and let the request begin; raises BodyError, which ends the parsing."""
        parser, upgrade = self.parser, self._get_upgrade()
        self._is_asking = parser.should_upgrade() and upgrade not in (None, b"websocket")
        # After a request that closes the connection nothing is parsed.
        self._is_asking &= parser.should_keep_alive()
        if self._is_asking:  # it is parsed again
            return
        self._stop_waiting()
        num_bytes = len(self.url) + sum(len(n) + len(v) for n, v in self.headers)
        hosts = [value for name, value in self.headers if name == b"host"]
        if num_bytes > MOST_BYTES:
            self._refusal = too_large()
        elif len(hosts) != 1 and self.parser.get_http_version() == "1.1":
            words = f"The request has {len(hosts)} Host headers, and needs one."
            self._refusal = BodyError(words)
        if self._refusal is not None:
            raise self._refusal
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._is_asking:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Say why a request is not read on, and close the connection."""
        error = self._refusal or BodyError(msg)
        self._refuse(error)

    def _wait(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(PATIENCE, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._num_bytes = None, 0

    def _give_up(self) -> None:
        words = "The headers of the request did not come."
        self._refuse(BodyError(words, status=HTTPStatus.REQUEST_TIMEOUT))

    def _refuse(self, error: BodyError) -> None:
        self._stop_waiting()
        # A reply on its way is not mixed with another.
        is_between = self.cycle is None or self.cycle.response_complete
        if is_between and not self.transport.is_closing():
            lines = [
                f"HTTP/1.1 {error.status.value} {error.status.phrase}",
                "content-type: text/plain; charset=utf-8",
                f"content-length: {len(str(error))}",
                "connection: close",
            ]
            self.transport.write("\r\n".join([*lines, "", str(error)]).encode())
        self.transport.close()


def too_large() -> BodyError:
    return BodyError(
        f"The headers of the request have more than {MOST_BYTES} bytes.",
        status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    )
