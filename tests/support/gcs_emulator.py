"""An emulator of Google Cloud Storage in memory: gcp-storage-emulator, with generations.

TensorStore asks for an object only where it changed, and overwrites it only where it did not. The
emulator answers neither condition and leaves out the header that they are made from. Its requests
are handled one at a time, so that what is checked here still holds when they are answered.

Usage: python gcs_emulator.py PORT
"""

import contextlib
import logging
import re
import sys
from functools import partial
from http import HTTPStatus
from http.server import HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import google.cloud.storage
import pytest
from emulators import serving
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

_OBJECT = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)")
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")


class ConditionalHandler(RequestHandler):
    """Adds ifGenerationMatch, ifGenerationNotMatch and x-goog-generation."""

    sent_generation: str | None = None

    def do_GET(self) -> None:
        self._if_allowed(super().do_GET)

    def do_POST(self) -> None:
        self._if_allowed(super().do_POST)

    def do_DELETE(self) -> None:
        self._if_allowed(super().do_DELETE)

    def end_headers(self) -> None:
        if self.sent_generation is not None:
            self.send_header("x-goog-generation", self.sent_generation)
        super().end_headers()

    def _if_allowed(self, handle: Any) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        generation = "0"  # of an object that is not there
        if match := _OBJECT.fullmatch(url.path) or _UPLOAD.fullmatch(url.path):
            name = match[2] if match.re is _OBJECT else query.get("name", "")
            try:
                found = self.storage.get_file_obj(match[1], unquote(name))
                generation = found["generation"]
            except NotFound:
                pass
        if query.get("ifGenerationMatch", generation) != generation:
            self._refuse(HTTPStatus.PRECONDITION_FAILED)
        elif query.get("ifGenerationNotMatch") == generation != "0":
            self._refuse(HTTPStatus.NOT_MODIFIED)
        else:
            if self.command == "GET" and generation != "0":
                self.sent_generation = generation
            handle()

    def _refuse(self, status: HTTPStatus) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


def running_emulator(log: Path) -> contextlib.AbstractContextManager[str]:
    """Run an emulator in a process of its own; the value of the `with` block is its address."""
    return serving(__file__, log, use_gcs)


def use_gcs(patch: pytest.MonkeyPatch, address: str) -> None:
    patch.setenv("STORAGE_EMULATOR_HOST", address)  # gcsfs, google-cloud-storage
    patch.setenv("TENSORSTORE_GCS_HTTP_URL", address)


def make_bucket(name: str) -> None:
    """Makes a bucket in the emulator, which knows no projects."""
    client = google.cloud.storage.Client.create_anonymous_client()
    client.project = "none"
    client.create_bucket(name)
    client.close()


if __name__ == "__main__":
    logging.disable()
    storage = Storage(use_memory_fs=True)
    HTTPServer(
        ("127.0.0.1", int(sys.argv[1])), partial(ConditionalHandler, storage)
    ).serve_forever()
