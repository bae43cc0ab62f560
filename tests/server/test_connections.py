"""What comes before a body: headers that are too large, too slow, or without a host."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from live import listening
from selection import in_one_test
from specdec_mlx.server import app, connections
from specdec_mlx.server.command import http_protocol
from specdec_mlx.server.flags import ServerSettings

SECONDS = 240  # after which a test that waits fails
GET = "GET /api/hello HTTP/1.1\r\n"
HOST, ANOTHER = "Host: localhost\r\n", "X: y\r\n"


@contextmanager
def server() -> Iterator[int]:
    """A server of an engine that no request gets to."""
    nobody: Any = None
    made = app.make_app(nobody, ServerSettings())
    with listening(made, lifespan="off", http=http_protocol()) as port:
        yield port


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with server() as port:
        yield port


def reply_to(port: int, *parts: str) -> str:
    """All that a server says until it closes the connection, or to the first request."""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        received = b""
        try:
            for sent in parts:
                connection.sendall(sent.encode())
            while b'"hello"}' not in received and (part := connection.recv(2**16)):
                received += part
        except ConnectionError:
            pass
    return received.decode()


LARGE = [
    f"{GET}{HOST}X: {'x' * 2**17}\r\n\r\n",
    f"{GET}{HOST}{ANOTHER * 2**15}\r\n",
    f"GET /{'x' * 2**17} HTTP/1.1\r\n{HOST}\r\n",
    f"{GET}{HOST}X: {'x' * 2**24}",
    f"{GET}{HOST}{ANOTHER * 2**20}",
]


@in_one_test("request", LARGE)
def test_headers_have_a_bound(request: str, port: int) -> None:
    """In one name or many, in the path, and without an end."""
    reply = reply_to(port, request)
    assert reply.startswith("HTTP/1.1 431 ") or reply == ""  # it was closed while this one sent


def test_the_bound_is_told(port: int) -> None:
    reply = reply_to(port, f"{GET}{HOST}X: {'x' * (connections.MOST_BYTES + 1)}\r\n\r\n")
    assert reply.startswith("HTTP/1.1 431 ")
    assert reply.count("HTTP/1.1") == 1
    assert "connection: close" in reply


def test_ordinary_headers_are_taken(port: int) -> None:
    """Each time anew: what one request of a connection has is none of the next."""
    half = f"{GET}{HOST}X: {'x' * (connections.MOST_BYTES // 2)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        for _ in range(4):
            for part in (half[:50], half[50:-9], half[-9:]):
                time.sleep(0.02)  # so that they come one by one
                connection.sendall(part.encode())
            received = b""
            while b'"hello"}' not in received:
                more = connection.recv(2**16)
                assert more, received
                received += more


HOSTS = [
    ("", "1.1", "400"),
    (HOST, "1.1", "200"),
    (HOST * 2, "1.1", "400"),
    ("", "1.0", "200"),
    (HOST, "1.0", "200"),
]


@in_one_test(("hosts", "version", "status"), HOSTS)
def test_a_request_names_one_host(hosts: str, version: str, status: str, port: int) -> None:
    reply = reply_to(port, f"GET /api/hello HTTP/{version}\r\n{hosts}\r\n")
    assert reply.startswith(f"HTTP/1.1 {status} ")
    assert reply.count("HTTP/1.1") == 1


JAVA = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
POST = f"POST /messages HTTP/1.1\r\n{HOST}Content-Length: 2\r\n"


def test_a_request_that_asks_for_another_protocol_is_served(port: int) -> None:
    """Java's own client asks for HTTP/2, and sends the body in HTTP/1.1. Others may follow."""
    asking = f"{POST}{JAVA}\r\n" + "{}"
    closing = f"{POST}Connection: close\r\n\r\n" + "{}"
    expected = reply_to(port, closing)
    assert "required field" in expected
    for parts in ([asking + asking + closing], [asking[:99], asking[99:-1], "}" + closing]):
        received = reply_to(port, *parts)
        assert received.count("required field") == len("".join(parts).split("POST")) - 1
    assert reply_to(port, f"{GET}{HOST}{JAVA}\r\n").startswith("HTTP/1.1 200 ")
    refused = reply_to(port, f"{GET}{HOST}{HOST}{JAVA}\r\n")
    assert refused.startswith("HTTP/1.1 400 ")
    tunnel = reply_to(port, f"CONNECT example.com:443 HTTP/1.1\r\n{HOST}{JAVA}\r\n")
    assert not tunnel.startswith("HTTP/1.1 200 ")


def test_what_is_no_request_is_refused(port: int) -> None:
    assert reply_to(port, "\x16\x03\x01\x02\r\n\r\n").startswith("HTTP/1.1 400 ")


@in_one_test("sent", ["", "GET", f"{GET}{HOST}", f"{GET}{HOST}\r\nGET"])
def test_headers_that_do_not_come_are_given_up(sent: str) -> None:
    """Those of the first request of a connection, and of the next."""
    with pytest.MonkeyPatch.context() as patch, server() as port:
        patch.setattr(connections, "PATIENCE", 0.05)
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
            connection.sendall(sent.encode())
            received = b""
            while part := connection.recv(2**16):
                received += part
    assert b"HTTP/1.1 408 " in received
