"""Access: the web pages, host names and keys that the server answers."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import closing
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from selection import in_one_test
from serving import until
from specdec_mlx.server.app import make_app
from specdec_mlx.server.command import Signals, bound, listen
from specdec_mlx.server.flags import KEY_VARIABLE, ServerSettings, parse_settings
from specdec_mlx.server.requests import Ended, TextPiece

SECRET = "the content"
BODY = {"messages": [{"role": "user", "content": "go"}]}
POSTS: dict[str, Any] = {
    "/v1/chat/completions": BODY,
    "/v1/completions": {"prompt": "go"},
    "/v1/messages": BODY | {"max_tokens": 9},
    "/v1/messages/count_tokens": BODY,
    "/v1/responses": {"input": "go"},
    "/v1/embeddings": {"input": "go"},
}
GETS = ["/", "/health", "/metrics", "/api/hello", "/v1/models", "/v1/models/one", "/v1/responses"]
EVIL = {"Host": "localhost:8080", "Origin": "https://evil.example"}
LOCAL = {"Host": "localhost:8080"}


class Engine:
    """A stand-in that answers each request with the content."""

    running, waiting, is_alive = 0, 0, True
    models = SimpleNamespace(
        listed=lambda: [{"id": "one", "created": 0}], can_see=lambda request: False
    )

    def submit(self, request: Any, put: Any) -> Any:
        put(TextPiece(SECRET))
        put(Ended("stop"))
        return SimpleNamespace(cancel=lambda: None)

    def num_tokens(self, request: Any) -> int:
        return 7


def ask(
    settings: ServerSettings,
    path: str,
    headers: dict[str, str],
    body: Any = None,
    method: str | None = None,
) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of an answer."""
    sent: list[Any] = []
    parts = [{"type": "http.request", "body": json.dumps(body).encode() if body else b""}]
    scope = {
        "type": "http",
        "method": method or ("GET" if body is None else "POST"),
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "scheme": "http",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }

    async def receive() -> Any:
        if not parts:
            await asyncio.sleep(60)
        return parts.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    engine: Any = Engine()
    asyncio.run(make_app(engine, settings)(scope, receive, send))
    told = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    text = b"".join(message.get("body", b"") for message in sent[1:]).decode()
    return sent[0]["status"], told, text


def is_answered(settings: ServerSettings, headers: dict[str, str]) -> bool:
    """True if the content comes; a refusal is 403, and tells browsers nothing that allows it."""
    status, told, text = ask(settings, "/v1/chat/completions", headers, BODY)
    assert (status, SECRET in text) in ((200, True), (403, False)), (status, text)
    assert status == 200 or not any(name.startswith("access-control-allow") for name in told)
    return status == 200


LOOPBACK, OPEN = ServerSettings(host="127.0.0.1"), ServerSettings(host="0.0.0.0")
NAMED = ServerSettings(host="mac.local", allowed_hosts=("mac.example",))

HOSTS = [
    # Host, answered on a loopback address, on all addresses, on a name that is given
    ("localhost:8080", True, True, True),
    ("LocalHost", True, True, True),
    ("127.0.0.1:8080", True, True, True),
    ("127.0.0.1", True, True, True),
    ("[::1]:9", True, True, True),
    ("[::1]", True, True, True),
    ("192.168.1.5:8080", False, True, True),
    ("[fe80::1]:8080", False, True, True),
    ("0.0.0.0:8080", False, True, True),
    ("mac.local:8080", False, False, True),
    ("MAC.example", False, False, True),
    ("evil.example", False, False, False),
    ("evil.example:8080", False, False, False),
    ("localhost.evil.example", False, False, False),
    ("127.0.0.1.evil.example", False, False, False),
    ("evil.example:80:80", False, False, False),
    ("localhost:8080@evil.example", False, False, False),
    ("[::1", False, False, False),
    ("", False, False, False),
]


@in_one_test(("host", "on_loopback", "on_all", "on_a_name"), HOSTS)
def test_a_server_answers_to_its_own_names(
    host: str, on_loopback: bool, on_all: bool, on_a_name: bool
) -> None:
    """A page can have its name resolved to this machine, so that another name is refused."""
    found = [is_answered(settings, {"Host": host}) for settings in (LOOPBACK, OPEN, NAMED)]
    assert found == [on_loopback, on_all, on_a_name]
    assert is_answered(ServerSettings(allowed_hosts=("*",)), {"Host": "any.name"})


TRUSTED = [
    "http://localhost",
    "http://localhost:3000",
    "https://localhost:3000",
    "http://127.0.0.1:5173",
    "http://[::1]:3000",
    "vscode-webview://0abc",
    "vscode-file://vscode-app",
    "app://obsidian.md",
    "tauri://localhost",
    "http://tauri.localhost",
    "https://tauri.localhost",
    "file://",
]
FOREIGN = [
    "https://evil.example",
    "http://localhost.evil.example",
    "http://127.0.0.1.evil.example:8080",
    "http://evil.example:8080",
    "http://192.168.1.5:3000",
    "https://app://x",
    "http://localhost:3000.evil.example",
    "chrome-extension://abc",
    "null",
    "",
]


@in_one_test("origin", TRUSTED)
def test_pages_of_this_machine_and_applications_may_use_the_server(origin: str) -> None:
    headers = LOCAL | {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
    for settings in LOOPBACK, OPEN:
        status, told, text = ask(settings, "/v1/chat/completions", headers, BODY)
        assert (status, SECRET in text) == (200, True)
        assert told["access-control-allow-origin"] == origin
        assert "Origin" in told["vary"]


@in_one_test("origin", FOREIGN)
def test_other_pages_may_not_use_the_server(origin: str) -> None:
    """Also not where a sandboxed frame, or a form without a referrer, hides the origin."""
    for settings in LOOPBACK, OPEN:
        assert not is_answered(settings, LOCAL | {"Origin": origin})


@in_one_test("path", [*POSTS, *GETS, "/nothing"])
def test_no_path_is_answered_to_a_foreign_page(path: str) -> None:
    """In the form of the protocol: Anthropic's has a type beside the error."""
    body = POSTS.get(path)
    foreign = [EVIL, {"Host": "evil.example"}, LOCAL | {"Sec-Fetch-Site": "cross-site"}]
    for headers in foreign:
        status, told, text = ask(LOOPBACK, path, headers, body)
        assert status == 403
        assert not any(name.startswith("access-control") for name in told)
        assert ("type" in json.loads(text)) is ("messages" in path)
        assert json.loads(text)["error"]["message"].startswith("This server does not answer")
    for origin in ({}, {"Origin": "http://localhost:3000"}, {"Sec-Fetch-Site": "none"}):
        status, told, _ = ask(LOOPBACK, path, LOCAL | origin, body)
        assert status != 403
        assert ("access-control-allow-origin" in told) is ("Origin" in origin)


def test_a_preflight_is_answered_to_permitted_pages_only() -> None:
    wanted = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        "Access-Control-Request-Private-Network": "true",
    }
    settings = ServerSettings(api_key="secret")  # which no preflight brings along
    for path in (*POSTS, *GETS):
        own = LOCAL | wanted | {"Origin": "http://localhost:3000"}
        status, told, _ = ask(settings, path, own, method="OPTIONS")
        assert status == 200
        assert told["access-control-allow-origin"] == "http://localhost:3000"
        assert told["access-control-allow-headers"] == "authorization,content-type"
        assert told["access-control-allow-private-network"] == "true"
        status, told, _ = ask(settings, path, EVIL | wanted, method="OPTIONS")
        assert status == 403
        assert not any(name.startswith("access-control") for name in told)


def test_flags_permit_more_pages_and_names() -> None:
    origins = "https://Chat.example/,https://*.mine.example, null"
    flags = ["--allowed-origins", origins, "--allowed-hosts", "Mac.local,specdec"]
    settings = parse_settings(flags)
    for origin in ("https://chat.example", "https://a.mine.example", "null", "file://"):
        assert is_answered(settings, LOCAL | {"Origin": origin}), origin
    for origin in ("https://evil.example", "http://chat.example", "https://mine.example"):
        assert not is_answered(settings, LOCAL | {"Origin": origin}), origin
    for host in ("mac.local:8080", "specdec", "127.0.0.1"):
        assert is_answered(settings, {"Host": host}), host
    everybody = parse_settings(["--allowed-origins", "*"])
    assert is_answered(everybody, EVIL)
    assert is_answered(everybody, LOCAL | {"Sec-Fetch-Site": "cross-site"})
    assert not is_answered(everybody, EVIL | {"Host": "evil.example"})


def test_a_page_of_the_server_itself_may_use_it() -> None:
    """By the address that it was loaded from, and no other port there."""
    host = {"Host": "192.168.1.5:8080"}
    assert is_answered(OPEN, host | {"Origin": "http://192.168.1.5:8080"})
    assert not is_answered(OPEN, host | {"Origin": "http://192.168.1.5:3000"})
    assert not is_answered(LOOPBACK, {"Host": "evil.example", "Origin": "http://evil.example"})


# The key

KEY = "s3cret-ü"
KEYED = ServerSettings(api_key=KEY)
RIGHT = [
    {"Authorization": f"Bearer {KEY}"},
    {"authorization": f"bearer  {KEY} "},
    {"x-api-key": KEY},
    {"Authorization": "Bearer none", "X-Api-Key": KEY},
]
WRONG = [
    {},
    {"Authorization": KEY},
    {"Authorization": f"Basic {KEY}"},
    {"Authorization": f"Bearer {KEY}x"},
    {"Authorization": f"Bearer {KEY[:-1]}"},
    {"Authorization": "Bearer"},
    {"x-api-key": ""},
    {"x-api-key": f"Bearer {KEY}"},
]


@in_one_test("headers", RIGHT)
def test_the_key_is_taken_in_both_forms(headers: dict[str, str]) -> None:
    for path in (*POSTS, *GETS):
        assert ask(KEYED, path, LOCAL | headers, POSTS.get(path))[0] not in (401, 403), path


@in_one_test("headers", WRONG)
def test_nothing_is_answered_without_the_key(headers: dict[str, str]) -> None:
    """But whether the server lives. The error has the form of the protocol."""
    for path in (*POSTS, *GETS, "/nothing"):
        status, told, text = ask(KEYED, path, LOCAL | headers, POSTS.get(path))
        if path == "/health":
            assert status == 200
            continue
        assert (status, told["www-authenticate"]) == (401, "Bearer")
        assert KEY not in text
        error = json.loads(text)["error"]
        if "messages" in path:
            assert error["type"] == "authentication_error"
        else:
            assert error["code"] == "invalid_api_key"


def test_a_permitted_page_may_read_that_the_key_is_wrong() -> None:
    headers = LOCAL | {"Origin": "http://localhost:3000"}
    status, told, _ = ask(KEYED, "/v1/models", headers)
    assert (status, told["access-control-allow-origin"]) == (401, "http://localhost:3000")


def test_the_key_comes_from_the_flag_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert parse_settings([]).api_key is None
    monkeypatch.setenv(KEY_VARIABLE, " of the environment\n")
    assert parse_settings([]).api_key == "of the environment"
    assert parse_settings(["--api-key", "of the flag"]).api_key == "of the flag"
    assert "of the" not in repr(parse_settings([]))
    with pytest.raises(SystemExit):
        parse_settings(["--help-all"])
    assert "of the environment" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parse_settings(["--api-key", " "])
    assert "the key is empty" in capsys.readouterr().err
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert parse_settings([]).api_key is None


@pytest.mark.parametrize(
    ("host", "key", "warns"),
    [("0.0.0.0", None, True), ("0.0.0.0", KEY, False), ("127.0.0.1", None, False)],
)
def test_a_server_that_others_can_reach_warns_at_its_start_without_a_key(
    host: str, key: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """In one line. The key is in no line. The socket is a loopback one here."""
    caplog.set_level(logging.DEBUG)
    settings = ServerSettings(host=host, api_key=key, port=0)
    engine = Mock()
    signals = Signals()
    with closing(bound("127.0.0.1", 0)) as listener:
        thread = Thread(target=listen, args=(engine, settings, listener, signals))
        before, thread.daemon = signals.end, True
        thread.start()
        until(lambda: signals.end is not before or not thread.is_alive())
        signals.end()
        thread.join(60)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("has no key" in line for line in lines) == warns
    assert any("Ready" in line for line in lines)
    assert not any(KEY in line for line in lines)
