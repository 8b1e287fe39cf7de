"""A server that speaks as much of S3 as pyarrow asks for: objects, listings, uploads in parts. For tests, which may let it fail.

It keeps its objects in memory and knows no signatures: whoever has the key `nobody` is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import IO
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Objects = dict[str, tuple[bytes, datetime]]  # by bucket/name: the content, and when it was put


class Bucket:
    """What the server has of one bucket, and how it behaves. fails: of the method and the path of a request, whether it fails."""

    name = "bucket"

    def __init__(self) -> None:
        self.objects: Objects = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.fails: Callable[[str, str], bool] = lambda method, path: False
        self.requests: list[str] = []
        self.lock = threading.Lock()
        self.port = 0

    def names(self, beginning: str = "") -> set[str]:
        """Of its objects, those that begin so, without that; marks of folders are none."""
        whole = f"{self.name}/{beginning}"
        return {
            name.removeprefix(whole)
            for name in list(self.objects)
            if name.startswith(whole) and not name.endswith("/")
        }

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@contextmanager
def serve(bucket: Bucket) -> Iterator[None]:
    handler = type("Handler", (_Handler,), {"bucket": bucket})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *of: None  # type: ignore[method-assign]  # whoever asked is gone: killed, perhaps
    bucket.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    bucket: Bucket
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._handle(self._get)

    def do_HEAD(self) -> None:
        self._handle(self._get)

    def do_PUT(self) -> None:
        self._handle(self._put)

    def do_POST(self) -> None:
        self._handle(self._post)

    def do_DELETE(self) -> None:
        self._handle(self._delete)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - of the base class
        """Nothing."""

    def _handle(self, act: Callable[[bytes], None]) -> None:
        parts = urlsplit(self.path)
        self.key = unquote(parts.path).lstrip("/")
        self.asked = {
            name: values[0]
            for name, values in parse_qs(parts.query, keep_blank_values=True).items()
        }
        content = self._body()
        self.bucket.requests.append(f"{self.command} {self.path}")
        if self.key.split("/")[0] != self.bucket.name:
            self._refuse(404, "NoSuchBucket")
        elif "Credential=nobody/" in self.headers.get("Authorization", "Credential=nobody/"):
            self._refuse(403, "AccessDenied")
        elif self.bucket.fails(self.command, self.key):
            self._refuse(400, "InvalidRequest")  # pyarrow does not try again
        else:
            with self.bucket.lock:
                act(content)

    def _body(self) -> bytes:
        """Of a request whose length is told, or comes in chunks; what pyarrow sends is once more in chunks within."""
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        content = (
            _joined(self.rfile)
            if chunked
            else self.rfile.read(int(self.headers.get("Content-Length") or 0))
        )
        return (
            _joined(BytesIO(content))
            if self.headers.get("Content-Encoding") == "aws-chunked"
            else content
        )

    def _get(self, _: bytes) -> None:
        if self.key.rstrip("/") == self.bucket.name:
            self._list()
        elif self.key in self.bucket.objects:
            content, at = self.bucket.objects[self.key]
            begin, end = 0, len(content)
            if asked := self.headers.get("Range"):
                first, last = asked.removeprefix("bytes=").split("-")
                begin, end = int(first), min(end, int(last or end) + 1)
            self._answer(
                206 if asked else 200,
                content[begin:end],
                at,
                f"bytes {begin}-{end - 1}/{len(content)}",
            )
        else:
            self._refuse(404, "NoSuchKey")

    def _list(self) -> None:
        bucket, beginning, delimiter = (
            self.bucket.name,
            self.asked.get("prefix", ""),
            self.asked.get("delimiter", ""),
        )
        found, folders = [], set()
        for key, (content, at) in sorted(self.bucket.objects.items()):
            name = key.removeprefix(f"{bucket}/")
            if not name.startswith(beginning):
                continue
            below = name[len(beginning) :]
            if delimiter and delimiter in below:
                folders.add(beginning + below.split(delimiter)[0] + delimiter)
            else:
                found.append(
                    f"<Contents><Key>{escape(name)}</Key><LastModified>{at:%Y-%m-%dT%H:%M:%S.%fZ}</LastModified>"
                    f"<Size>{len(content)}</Size></Contents>"
                )
        shared = "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in sorted(folders)
        )
        count = f"<KeyCount>{len(found) + len(folders)}</KeyCount><IsTruncated>false</IsTruncated>"
        self._answer_xml(f"<ListBucketResult>{count}{''.join(found)}{shared}</ListBucketResult>")

    def _put(self, content: bytes) -> None:
        if upload := self.asked.get("uploadId"):
            self.bucket.parts[upload][int(self.asked["partNumber"])] = content
        else:
            self.bucket.objects[self.key] = content, datetime.now(UTC)
        self._answer(200, b"")

    def _post(self, content: bytes) -> None:
        if "uploads" in self.asked:
            upload = str(len(self.bucket.parts))
            self.bucket.parts[upload] = {}
            self._answer_xml(
                f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            )
        elif "delete" in self.asked:
            self._refuse(501, "NotImplemented")
        else:
            parts = self.bucket.parts[self.asked["uploadId"]]
            self.bucket.objects[self.key] = (
                b"".join(parts[number] for number in sorted(parts)),
                datetime.now(UTC),
            )
            self._answer_xml(
                "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
            )

    def _delete(self, _: bytes) -> None:
        self.bucket.objects.pop(self.key, None)
        self._answer(204, b"")

    def _answer_xml(self, text: str, status: int = 200) -> None:
        self._answer(status, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode())

    def _refuse(self, status: int, code: str) -> None:
        self._answer_xml(
            f"<Error><Code>{code}</Code><Message>{code} it says</Message></Error>", status
        )

    def _answer(
        self, status: int, content: bytes, at: datetime | None = None, span: str = ""
    ) -> None:
        self.send_response(status)
        if at:
            self.send_header("Last-Modified", f"{at:%a, %d %b %Y %H:%M:%S} GMT")
        if span:
            self.send_header("Content-Range", span)
        self.send_header("ETag", '"x"')
        self.send_header("Content-Type", "application/xml")
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _joined(stream: IO[bytes]) -> bytes:
    """What comes in chunks, each after its length, up to one of none and what may trail that."""
    pieces = []
    while length := int(stream.readline().split(b";")[0], 16):
        pieces.append(stream.read(length))
        stream.readline()
    while stream.readline().strip():
        pass
    return b"".join(pieces)
