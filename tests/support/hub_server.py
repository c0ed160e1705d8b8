"""As much of the Hugging Face Hub as fetching needs, on this machine."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

MAIN, OTHER = "a" * 40, "b" * 40


@dataclass
class Hub:
    """What it serves and what was asked of it."""

    models: Mapping[str, Mapping[str, Mapping[str, bytes]]]
    """Name, revision, path of a file."""
    refusals: Mapping[str, tuple[int, str]]
    """Name to a status and the Hub's error code."""
    address: str = ""
    requests: list[str] = field(default_factory=list)
    """Method and path."""

    card: Mapping[str, Any] | None = None
    """What the card of each repository says in its YAML."""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers, content."""
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        api = parts[0] == "api" and parts[1] in ("models", "datasets")
        if parts[0] == "datasets":  # their files; models have theirs at the top
            parts = parts[1:]
        name = "/".join(parts[2:4] if api else parts[:2])
        rest = parts[4:] if api else parts[2:]
        if name in self.refusals:
            status, code = self.refusals[name]
            return status, {"X-Error-Code": code}, b"{}"
        if name not in self.models:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        revisions = self.models[name]
        if api and rest[:1] == ["tree"]:
            files, folder = revisions[rest[1]], "/".join(rest[2:])
            return _json([
                {"type": "file", "path": path, "size": len(data),
                 "oid": hashlib.sha1(data).hexdigest()}
                for path, data in files.items()
                if not folder or path.startswith(f"{folder}/")
            ])  # fmt: skip
        revision = "/".join(rest[1:]) if api else rest[1]
        commit = {"": MAIN, "main": MAIN, "refs/pr/1": OTHER}.get(revision, revision)
        if commit not in revisions:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = revisions[commit]
        if api:
            siblings = [{"rfilename": path} for path in files]
            found = {"id": name, "sha": commit, "siblings": siblings}
            return _json(found if self.card is None else {**found, "cardData": self.card})
        data = files["/".join(rest[2:])]
        return 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}, data


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serves `hub` at its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            status, headers, content = hub.answer(self.path)
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if wanted and status == 200:
                begin, end = int(wanted[1]), int(wanted[2]) + 1
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
                status, content = 206, content[begin:end]
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()
