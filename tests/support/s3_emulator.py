"""An emulator of S3 in memory: objects, ranges, listings, and conditional writes.

Usage: python s3_emulator.py PORT [ignores|refuses]

With `ignores`, conditions of writes are ignored, as by stores without conditional writes; with
`refuses`, such a write is answered by 501. The number of requests so far is the object `requests`
of any bucket. The name of a bucket that exists begins with "bucket".
"""

import contextlib
import email.utils
import hashlib
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from emulators import serving


class S3Handler(BaseHTTPRequestHandler):
    """Path-style requests; signatures are not checked."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body of an answer waits for the head's receipt
    ignores = refuses = False
    objects: ClassVar[dict[str, tuple[bytes, float]]] = {}
    lock = threading.Lock()
    requests = 0

    def handle_one(self) -> None:
        url = urlsplit(self.path)
        key = unquote(url.path).lstrip("/")
        query = {name: each[0] for name, each in parse_qs(url.query, True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.lock:
            S3Handler.requests += 1
            bucket, _, name = key.partition("/")
            if not bucket.startswith("bucket"):
                self.answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
            elif name == "requests":
                self.answer(200, str(self.requests).encode())
            elif self.command == "PUT":
                self.put(key, body)
            elif self.command == "DELETE":
                self.objects.pop(key, None)
                self.answer(204)
            elif self.command == "POST" and "delete" in query:
                names = [each.partition("</Key>")[0] for each in body.decode().split("<Key>")[1:]]
                for each in names:
                    self.objects.pop(f"{bucket}/{each}", None)
                done = "".join(f"<Deleted><Key>{each}</Key></Deleted>" for each in names)
                self.answer(200, f"<DeleteResult>{done}</DeleteResult>".encode())
            elif not name:
                self.list(bucket, query)
            elif key not in self.objects:
                self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            else:
                self.get(*self.objects[key])
        # Without the lock: a client may read an answer only after the answers to other requests.
        status, body, headers = self.reply
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one

    def put(self, key: str, body: bytes) -> None:
        if self.refuses and ("If-None-Match" in self.headers or "If-Match" in self.headers):
            self.answer(501, b"<Error><Code>NotImplemented</Code></Error>")
            return
        found = self.objects.get(key)
        wrong = "If-None-Match" in self.headers and found is not None
        if "If-Match" in self.headers:
            wrong = found is None or self.headers["If-Match"] != etag(found[0])
        if wrong and not self.ignores:
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        self.objects[key] = body, time.time()
        self.answer(200, b"", ETag=etag(body))

    def get(self, data: bytes, when: float) -> None:
        headers = {"ETag": etag(data), "Last-Modified": email.utils.formatdate(when, usegmt=True)}
        if "Range" in self.headers:
            begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
            part = data[int(begin) : int(end or len(data)) + 1]
            last = int(begin) + len(part) - 1
            headers["Content-Range"] = f"bytes {begin}-{last}/{len(data)}"
            self.answer(206, part, **headers)
        else:
            self.answer(200, data, **headers)

    def list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, mark = query.get("prefix", ""), query.get("delimiter", "")
        found, folders = [], dict[str, None]()
        for key in sorted(self.objects):
            name = key.removeprefix(f"{bucket}/")
            if name == key or not name.startswith(prefix):
                continue
            if mark and mark in (rest := name[len(prefix) :]):
                folders[prefix + rest.partition(mark)[0] + mark] = None
                continue
            data, when = self.objects[key]
            date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(when))
            found.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{date}</LastModified>"
                f"<ETag>{escape(etag(data))}</ETag><Size>{len(data)}</Size></Contents>"
            )
        found += [
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders
        ]
        head = f"<Name>{bucket}</Name><IsTruncated>false</IsTruncated>"
        self.answer(200, f"<ListBucketResult>{head}{''.join(found)}</ListBucketResult>".encode())

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.reply = status, body, headers

    def log_message(self, *_: object) -> None:
        pass


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def running_s3(log: Path, *options: str) -> contextlib.AbstractContextManager[str]:
    """Run an emulator in a process of its own; the value of the `with` block is its address."""
    return serving(__file__, log, use_s3, *options, probe="/bucket/requests")


def use_s3(patch: pytest.MonkeyPatch, address: str) -> None:
    patch.setenv("AWS_ENDPOINT_URL", address)
    patch.setenv("AWS_ALLOW_HTTP", "true")
    patch.setenv("AWS_REGION", "us-east-1")
    patch.setenv("AWS_ACCESS_KEY_ID", "none")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    with contextlib.suppress(ImportError):
        from obstore.fsspec import FsspecStore

        FsspecStore.clear_instance_cache()  # file systems of an emulator that has ended


def requests(address: str) -> int:
    with urllib.request.urlopen(f"{address}/bucket/requests") as reply:
        return int(reply.read())


if __name__ == "__main__":
    S3Handler.ignores, S3Handler.refuses = (o in sys.argv[2:] for o in ("ignores", "refuses"))
    ThreadingHTTPServer.request_queue_size = 128  # with 5, a client's connections are lost for 30 s
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), S3Handler).serve_forever()
