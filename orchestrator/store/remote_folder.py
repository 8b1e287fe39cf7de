"""List, read and write the files of a bucket through pyarrow's file systems.

These show an object once its last byte is written. S3 means Amazon's servers unless AWS_ENDPOINT_URL,
or `?endpoint_override=HOST:PORT&scheme=http`, names another one.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from orchestrator.common.errors import ConfigError, RunError, RunUnreachable
from orchestrator.store.untrusted_files import is_plain_name

Answer = TypeVar("Answer")

_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss")
_CONTAINER_FIRST = ("abfs", "abfss")  # abfss://container@account.dfs.core.windows.net/folder
_PIECE_BYTES = 1024**2
_DOWNLOADS = 16  # at a time; a bucket takes tens of milliseconds to answer each request
_ANSWER_S = 30.0  # for a server to answer the first request; some libraries try for 15 minutes
_OPTIONS = {
    # A small object takes one request with delayed opening, three without.
    "s3": "allow_delayed_open=true",
    "gs": f"retry_limit_seconds={_ANSWER_S:g}",
    "gcs": f"retry_limit_seconds={_ANSWER_S:g}",
}
# Parts of messages of pyarrow and the AWS SDK, and what to do about each.
_REMEDIES = {
    "NO_SUCH_BUCKET|no such bucket": "Create the bucket, or name another with --out",
    "ACCESS_DENIED|ACCESS_KEY|SIGNATURE|TOKEN|redential|Permission|HTTP status 403": (
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to credentials that may "
        "read and write there"
    ),
    "NETWORK_CONNECTION|resolve|onnect|timed out|no answer|UNAVAILABLE": (
        "Check the network and the address; AWS_ENDPOINT_URL names a server that is not Amazon's. "
        "Then run again"
    ),
}


class RemoteFolder:
    """A remote folder. Files are named by their paths within it.

    Each method may raise OSError; `reaching` turns it into RunUnreachable.
    """

    def __init__(self, address: str) -> None:
        """Raise ConfigError for an address that is wrong, RunUnreachable if it does not answer."""
        parts = urlsplit(address)
        if parts.scheme not in _SCHEMES or not parts.netloc:
            raise ConfigError(
                f"{address}: is no folder of a bucket",
                f"Name a folder, or write s3://bucket/folder ({', '.join(_SCHEMES)})",
            )
        is_container = parts.scheme in _CONTAINER_FIRST and parts.password is None
        if "@" in parts.netloc and not is_container and parts.username != "anonymous":
            raise ConfigError(
                f"{parts.scheme}://…@{parts.hostname}: credentials are no part of an address",
                "Set the environment variables of the service, such as AWS_ACCESS_KEY_ID",
            )
        self.address = address
        self._scheme = parts.scheme
        self._server = (parts.hostname or "") if is_container else parts.query
        with reaching(address):
            self._files, path = _answered_within(_ANSWER_S, lambda: _connect(address, parts))
        self._base = path.rstrip("/")

    def __str__(self) -> str:
        return self.address

    @property
    def path(self) -> Path:
        """A relative path that no other remote folder has."""
        server = self._server
        if self._scheme == "s3":
            names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
            server = f"{server} {next(filter(None, map(os.environ.get, names)), '')}".strip()
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{self._scheme} {server}").strip("-")
        parts = [part for part in self._base.split("/") if part not in ("", ".", "..")]
        return Path(name, *parts)

    def sizes(self, folder: str, recursive: bool = False) -> dict[str, int]:
        """Return the sizes of the files of a folder by name, of none if it is missing.

        Raise RunError for a name that leads out of the folder: a store accepts any text as a key.
        """
        selector = pafs.FileSelector(self._full(folder), allow_not_found=True, recursive=recursive)
        found = {}
        for info in self._files.get_file_info(selector):
            if info.type != pafs.FileType.File:
                continue
            name = info.path.removeprefix(f"{self._base}/")
            if not all(map(is_plain_name, name.split("/"))):
                raise RunError(
                    f"{self}: lists the file {name!r}, which is no path within it",
                    "Do not use this run, or remove that file from the bucket",
                )
            found[name] = info.size
        return found

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, None if it is missing."""
        try:
            with self._files.open_input_stream(self._full(name)) as stream:
                content: bytes = stream.read()
                return content
        except FileNotFoundError:
            return None

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Download files into a folder. One that is missing is left out: readers report it."""

        def fetch(name: str) -> None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            with suppress(FileNotFoundError):
                source = self._files.open_input_stream(self._full(name))
                with source, partial.open("wb") as file:
                    shutil.copyfileobj(source, file, _PIECE_BYTES)
                partial.rename(path)

        with ThreadPoolExecutor(_DOWNLOADS) as pool:
            list(pool.map(fetch, names))

    def put(self, name: str, source: Path | bytes) -> None:
        """Upload a file. Raise FileNotFoundError if the source is missing."""
        file = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
        with file, self._files.open_output_stream(self._full(name)) as stream:
            shutil.copyfileobj(file, stream, _PIECE_BYTES)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with suppress(FileNotFoundError):
            self._files.delete_file(self._full(name))

    def require_writable(self) -> None:
        """Write and remove a small file. Raise RunUnreachable if that fails."""
        name = f".write-test-{secrets.token_hex(4)}"
        with reaching(self):
            self.put(name, b"")
            self.remove(name)

    def _full(self, name: str) -> str:
        return f"{self._base}/{name}"


@contextmanager
def reaching(remote: RemoteFolder | str) -> Iterator[None]:
    """Raise RunUnreachable, with what to do about it, for errors of the network or the server."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        # These are of this host's disk, to which files are downloaded.
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = " ".join(str(error).split())
        remedies = (text for words, text in _REMEDIES.items() if re.search(words, reason))
        message = f"{remote}: cannot be reached: {_shorten(reason)}"
        raise RunUnreachable(message, next(remedies, "")) from error


def _shorten(reason: str) -> str:
    # The AWS SDK wraps the server's words in the name of the operation and the id of the request.
    found = re.search(
        r"AWS Error (\w+) during \w+ operation: (.*?)(?: \(Request ID.*|; Details.*)?$", reason
    )
    if not found:
        return reason
    name = found[1].lower().replace("_", " ")
    return f"{name}: {found[2]}".removesuffix("No response body.").rstrip(": ")


def _answered_within(limit_s: float, call: Callable[[], Answer]) -> Answer:
    """Return the result of a call. Raise TimeoutError if there is none within the limit.

    The call may then continue in its thread, which does not keep this process from ending.
    """
    answer = Future[Answer]()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([answer], limit_s).done:
        raise TimeoutError(f"no answer in {limit_s:g} s")
    return answer.result()


def _connect(address: str, parts: SplitResult) -> tuple[pafs.FileSystem, str]:
    """Return the file system of an address that answers, and the path within it."""
    option = _OPTIONS.get(parts.scheme, "")
    if option and option.partition("=")[0] not in parts.query:
        address = f"{address}{'&' if parts.query else '?'}{option}"
    try:
        files, path = pafs.FileSystem.from_uri(address)
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"{address}: {error}",
            "Write s3://bucket/folder?endpoint_override=HOST:PORT&scheme=http",
        ) from error
    if parts.scheme != "s3":  # which has time limits for each request
        files.get_file_info(path)
    return files, path
