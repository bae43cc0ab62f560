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
    faults: dict[str, int]

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
            self.send_response(fault)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content if fault is None else content[: len(content) // 2])

    def answer(self, reply: dict[str, object]) -> None:
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

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
