"""A server that speaks the Hub's HTTP interface, on this machine alone."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """Repositories with small files, in memory."""

    files: dict[str, bytes]
    created: list[dict[str, object]]
    asked: list[str]
    faults: dict[str, int]  # name -> status, or 0 for half of the file

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self.answer({"url": f"http://{self.headers['Host']}/datasets/me/memory"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular"} for file in files]
            self.answer({"files": [mode | {"shouldIgnore": False} for mode in modes]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.files[line["value"]["path"]] = content
            url = f"http://{self.headers['Host']}/datasets/me/memory/commit/{COMMIT}"
            self.answer({"commitUrl": url, "commitOid": COMMIT, "success": True})
        else:
            self.answer({})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if "/resolve/" not in self.path:
            self.answer({"id": "me/memory", "sha": COMMIT, "siblings": [], "type": "dataset"})
            return
        name = self.path.rpartition("/")[2]
        content, fault = self.files.get(name), self.faults.get(name)
        if self.command == "GET":
            self.asked.append(name)
        if fault:
            self.send(b"", fault, {"X-Error-Code": "RepoNotFound"})
        elif content is None:
            self.send(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            self.send(content, 200, headers, is_whole=fault is None)

    def answer(self, reply: dict[str, object]) -> None:
        self.send(json.dumps(reply).encode(), 200, {"Content-Type": "application/json"})

    def send(
        self, content: bytes, status: int, headers: dict[str, str], is_whole: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content if is_whole else content[: len(content) // 2])

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def hub_at() -> Iterator[tuple[str, type[Hub]]]:
    """The address of a running one, and what it holds; it ends with the block."""
    empty: dict[str, Any] = {"files": {}, "created": [], "asked": [], "faults": {}}
    handler = type("OwnHub", (Hub,), empty)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
