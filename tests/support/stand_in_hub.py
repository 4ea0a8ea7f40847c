"""A stand-in for the Hugging Face Hub on this host, which answers as the Hub does: with files, or with its errors."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from lightning_protrain.data import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Status and headers of an answer of the Hub.
Answer = tuple[int, dict[str, str]]
GATED: Answer = (403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model x is restricted."})
ABSENT: Answer = (404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
ABSENT_WITHOUT_LOGIN: Answer = (401, {"X-Error-Message": "Invalid username or password."})
WRONG_TOKEN: Answer = (401, {"X-Error-Message": "Invalid credentials in Authorization header"})
TOO_MANY: Answer = (429, {"Retry-After": "120"})
DENIED: Answer = (403, {"X-Error-Message": "Forbidden"})
BROKEN: Answer = (500, {"X-Error-Message": "Internal Error"})


class StandInHub(ThreadingHTTPServer):
    """Repositories by name: the error that each is answered with, or the files that it has.

    Args:
        repositories: Map from a name to an error, or to the contents of files by name.
    """

    daemon_threads = True

    def __init__(self, repositories: dict[str, Answer | dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.asked: list[str] = []
        # Errors of the parts of a push: "whoami-v2", "create", "preupload", "batch", "lfs" and "commit".
        self.refused: dict[str, Answer] = {}
        self.visibility: dict[str, str | None] = {}
        self.uploaded: dict[str, bytes] = {}  # by hash

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: StandInHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        if self.path != "/api/whoami-v2":
            self._answer(with_body=True)
        elif "whoami-v2" in self.server.refused:
            self._send(*self.server.refused["whoami-v2"], b"")
        else:
            self._send_json({"name": "me", "type": "user"})

    def do_POST(self) -> None:
        self._push(self._body())

    def do_PUT(self) -> None:
        self._push(self._body())

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _push(self, body: bytes) -> None:
        """Answer a request that writes: creates a repository, announces and uploads files, or commits them."""
        path, server = self.path.partition("?")[0], self.server
        parts = path.strip("/").split("/")
        names = ("whoami-v2", "create", "preupload", "batch", "lfs", "commit", "validate-yaml")
        part = next((name for name in names if name in parts), None)
        if part is None:
            self._answer(with_body=True)
            return
        server.asked.append(path)
        if part in server.refused:
            self._send(*server.refused[part], b"")
            return
        answer: Any = {}
        repository = "/".join(parts[2:4])
        if part == "create":
            asked = json.loads(body)
            repository = f"{asked['organization']}/{asked['name']}"
            exists = repository in server.repositories
            server.repositories.setdefault(repository, {})
            server.visibility.setdefault(repository, asked.get("visibility"))
            answer = {"url": f"{server.url}/{repository}", "name": repository}
            self._send_json(answer, 409 if exists else 200)
            return
        if part == "preupload":
            files = json.loads(body)["files"]
            modes = [
                "lfs" if file["path"].endswith((".safetensors", "tokenizer.json")) else "regular" for file in files
            ]
            answer = {
                "files": [
                    {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}
                    for file, mode in zip(files, modes, strict=True)
                ]
            }
        elif part == "batch":
            answer = {
                "transfer": "basic",
                "objects": [
                    {**file, "actions": {"upload": {"href": f"{server.url}/lfs/{file['oid']}"}}}
                    for file in json.loads(body)["objects"]
                ],
            }
        elif part == "lfs":
            assert hashlib.sha256(body).hexdigest() == parts[-1]
            server.uploaded[parts[-1]] = body
        elif part == "commit":
            files = server.repositories[repository]
            assert isinstance(files, dict)
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = server.uploaded[value["oid"]]
            answer = {"commitUrl": f"{server.url}/{repository}/commit/{COMMIT}", "commitOid": COMMIT}
        self._send_json(answer)

    def _send_json(self, answer: Any, status: int = 200) -> None:
        self._send(status, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        place = re.fullmatch(
            r"/(?:api/)?(?:models/|datasets/)?([\w.-]+/[\w.-]+)(?:/(resolve|revision|tree)/(.*))?", path
        )
        found = self.server.repositories.get(place[1], ABSENT) if place else (404, {})
        if isinstance(found, tuple):
            self._send(*found, b"")
            return
        assert place is not None
        name = (place[3] or "").partition("/")[2]
        if place[2] != "resolve":
            siblings = [{"rfilename": file} for file in found]
            tree = [{"type": "file", "path": file, "size": len(found[file]), "oid": "0" * 40} for file in found]
            private = self.server.visibility.get(place[1]) == "private"
            info = {"id": place[1], "sha": COMMIT, "siblings": siblings, "private": private}
            body = json.dumps(tree if place[2] == "tree" else info)
            self._send(200, {"Content-Type": "application/json"}, body.encode() if with_body else b"")
        elif name in found:
            tag = hashlib.sha256(found[name]).hexdigest()
            self._send(200, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, found[name], with_body)
        else:
            self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b"")

    def _send(self, status: int, headers: dict[str, str], body: bytes, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextmanager
def stand_in_hub(
    repositories: dict[str, Answer | dict[str, bytes]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StandInHub]:
    """Send this process to a `StandInHub`, with an empty cache below `folder`, and without a token."""
    server = StandInHub(repositories)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # Its client speaks to other servers.
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between the attempts of huggingface_hub
    hub.wait_for_hub.cache_clear()
    try:
        yield server
    finally:
        hub.wait_for_hub.cache_clear()
        server.shutdown()
        thread.join()
        server.server_close()
