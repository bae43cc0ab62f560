"""A server that speaks the Hub's HTTP interface, on this machine alone."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

COMMIT = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """Repositories with small files, in memory; faults: a file's status, or 0 to end in it."""

    endpoint: str
    files: dict[str, bytes]
    created: list[dict[str, object]]
    asked: list[str]
    faults: dict[str, int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        address, reply = f"{self.endpoint}/datasets/me/memory", dict[str, Any]()
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            reply = {"url": address}
        elif "/preupload/" in self.path:
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            reply = {"files": [mode | {"path": file["path"]} for file in json.loads(body)["files"]]}
        elif "/commit/" in self.path:
            values = [line["value"] for line in map(json.loads, body.splitlines())]
            sent = [value for value in values if "content" in value]
            self.files |= {value["path"]: base64.b64decode(value["content"]) for value in sent}
            reply = {
                "commitUrl": f"{address}/commit/{COMMIT}",
                "commitOid": COMMIT,
                "success": True,
            }
        self.answer(json.dumps(reply).encode())

    def do_GET(self) -> None:
        if "/resolve/" not in self.path:
            about = {"id": "me/memory", "sha": COMMIT, "siblings": [], "type": "dataset"}
            self.answer(json.dumps(about).encode())
            return
        name = self.path.rpartition("/")[2]
        if self.command == "GET":
            self.asked.append(name)
        content, fault = self.files.get(name), self.faults.get(name)
        if fault:
            self.answer(b"", fault, {"X-Error-Code": "RepoNotFound"})
        elif content is None:
            self.answer(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            tag = f'"{hashlib.sha256(content).hexdigest()}"'
            headers = {"X-Repo-Commit": COMMIT, "ETag": tag}
            self.answer(content, 200, headers, is_cut=fault is not None)

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer(
        self, content: bytes, status: int = 200, headers: Any = None, is_cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if is_cut else content)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def hub_at(cache: Path) -> Iterator[type[Hub]]:
    """What a running one holds, which stands for the Hub, with this cache, within the block."""
    empty: dict[str, Any] = {"files": {}, "created": [], "asked": [], "faults": {}}
    handler: type[Hub] = type("OwnHub", (Hub,), empty)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.endpoint = f"http://127.0.0.1:{server.server_port}"
    url = handler.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    constants = {"HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(cache)}
    constants |= {"ENDPOINT": handler.endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": url}
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in constants.items():
                patch.setattr(huggingface_hub.constants, name, value)
            yield handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
