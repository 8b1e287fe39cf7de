"""A folder elsewhere, by its address: what pyarrow's file systems reach (s3, gs, abfss, hdfs, file) and what fsspec does.

Amazon's servers are asked unless AWS_ENDPOINT_URL, or `?endpoint_override=HOST:PORT&scheme=http`, names others.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from orchestrator.common.errors import ConfigError, RunUnreachable

_WHOLE_WHEN_CLOSED = (
    "s3",
    "gcs",
    "abfs",
)  # an object is there with its last byte; elsewhere it is written aside and renamed
_PIECE_BYTES = 1024**2
_NETWORK = "Check the network and the address; AWS_ENDPOINT_URL names a server that is not Amazon's. Then run again"
_REMEDIES = {
    "NO_SUCH_BUCKET|no such bucket": "Create the bucket, or name another with --out",
    "ACCESS_DENIED|ACCESS_KEY|SIGNATURE|TOKEN|redential|Permission|HTTP status 403": (
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to what may read and write there"
    ),
    "NETWORK_CONNECTION|resolve|onnect|timed out": _NETWORK,
}


@dataclass(frozen=True)
class Entry:
    """A file there. at: when it was written, by the clock there; None where that is not told."""

    size: int
    at: datetime | None


class RemoteFolder:
    """Files by their names within it. Whatever it is asked may raise OSError: `reaching` makes one line of that."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for an address that names no place, RunUnreachable where what it names does not answer."""
        parts = urlsplit(address)
        if parts.username or parts.password:
            raise ConfigError(
                f"{parts.scheme}://…@{parts.hostname}: credentials are no part of an address",
                "Set AWS_ACCESS_KEY_ID and so on",
            )
        self.address = address
        self._scheme, self._query = parts.scheme, parts.query
        with reaching(address):
            self._files, base = _file_system(address, parts)
        self._base = base.rstrip("/")

    def __str__(self) -> str:
        return self.address

    @property
    def path(self) -> Path:
        """A relative one, of its own among all places."""
        where = f"{self._query} {_endpoint()}".strip() if self._scheme == "s3" else self._query
        server = (
            f"{self._scheme}-{re.sub(r'[^A-Za-z0-9.]+', '-', where).strip('-')}"
            if where
            else self._scheme
        )
        return Path(
            server, *(part for part in self._base.split("/") if part not in ("", ".", ".."))
        )

    def entries(self, folder: str, recursive: bool = False) -> dict[str, Entry]:
        """By name, the files of a folder within it; none where there is no such folder."""
        chosen = pafs.FileSelector(self._named(folder), allow_not_found=True, recursive=recursive)
        found = [
            info for info in self._files.get_file_info(chosen) if info.type == pafs.FileType.File
        ]
        return {info.path[len(self._base) + 1 :]: Entry(info.size, info.mtime) for info in found}

    def read(self, name: str) -> bytes | None:
        """A small file; None where there is none."""
        try:
            with self._files.open_input_stream(self._named(name)) as stream:
                content: bytes = stream.read()
                return content
        except FileNotFoundError:
            return None

    def fetch(self, name: str, target: Path) -> None:
        """Raises FileNotFoundError for what is not there any more."""
        with self._files.open_input_stream(self._named(name)) as stream, target.open("wb") as file:
            shutil.copyfileobj(stream, file, _PIECE_BYTES)

    def put(self, name: str, source: Path | bytes) -> None:
        """Whole, or as it was before. Raises FileNotFoundError where the source is gone."""
        target = self._named(name)
        if self._files.type_name in _WHOLE_WHEN_CLOSED:
            self._write(target, source)
            return
        folder, _, last = target.rpartition("/")
        aside = f"{folder}/.{last}.{secrets.token_hex(4)}"
        self._files.create_dir(folder)
        self._write(aside, source)
        self._files.move(aside, target)

    def remove(self, name: str) -> None:
        """There or not."""
        with suppress(FileNotFoundError):
            self._files.delete_file(self._named(name))

    def require_writable(self) -> None:
        """Write, read and remove a small file. Raise RunUnreachable if that fails."""
        name = f".write-test-{secrets.token_hex(4)}"
        with reaching(self):
            self.put(name, b"")
            self.entries("")
            self.remove(name)

    def _write(self, path: str, source: Path | bytes) -> None:
        if isinstance(source, bytes):
            with self._files.open_output_stream(path) as stream:
                stream.write(source)
            return
        with source.open("rb") as file, self._files.open_output_stream(path) as stream:
            shutil.copyfileobj(file, stream, _PIECE_BYTES)

    def _named(self, name: str) -> str:
        return f"{self._base}/{name}"


@contextmanager
def reaching(place: RemoteFolder | str) -> Iterator[None]:
    """Turns what keeps us from a place into one line with its remedy."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise  # of a disk of ours
        reason = " ".join(str(error).split())
        remedy = next(
            (remedy for words, remedy in _REMEDIES.items() if re.search(words, reason)), ""
        )
        raise RunUnreachable(f"{place}: cannot be reached: {_shortened(reason)}", remedy) from error


def _shortened(reason: str) -> str:
    """What a server or the network said, without what of ours was told it."""
    found = re.search(
        r"AWS Error (\w+) during \w+ operation: (.*?)(?: \(Request ID.*|; Details.*)?$", reason
    )
    return (
        f"{found[1].lower().replace('_', ' ')}: {found[2]}".removesuffix(
            "No response body."
        ).rstrip(": ")
        if found
        else reason
    )


def _file_system(address: str, parts: SplitResult) -> tuple[Any, str]:
    if parts.scheme == "s3":
        return _s3(parts), parts.netloc + parts.path
    try:
        files, path = pafs.FileSystem.from_uri(address)
        return files, path
    except pa.ArrowInvalid:
        return _by_fsspec(address)


def _s3(parts: SplitResult) -> Any:
    """An object at once where it is small, for which there are three requests by default; and by the thread that asks for it."""
    if not parts.netloc:
        raise ConfigError(f"{parts.geturl()}: names no bucket", "Write s3://bucket/folder")
    options: dict[str, Any] = dict(parse_qsl(parts.query))
    options |= {
        name: text.lower() == "true"
        for name, text in options.items()
        if text.lower() in ("true", "false")
    }
    if (endpoint := _endpoint()) and "endpoint_override" not in options:
        server = urlsplit(endpoint if "//" in endpoint else f"https://{endpoint}")
        options |= {"endpoint_override": server.netloc, "scheme": server.scheme}
    region = (
        options.get("region")
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
    )
    if region is None:
        region = (
            "us-east-1" if "endpoint_override" in options else pafs.resolve_s3_region(parts.netloc)
        )
    try:
        return pafs.S3FileSystem(
            allow_delayed_open=True, background_writes=False, **{**options, "region": region}
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{parts.geturl()}: {error}",
            "Write s3://bucket/folder?endpoint_override=HOST:PORT&scheme=http",
        ) from error


def _endpoint() -> str:
    names: Mapping[str, str] = os.environ
    return names.get("AWS_ENDPOINT_URL_S3") or names.get("AWS_ENDPOINT_URL") or ""


def _by_fsspec(address: str) -> tuple[Any, str]:
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(address)
    except (ValueError, ImportError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(
            f"{address}: {said}",
            "Name a folder, s3://bucket/folder, or what fsspec has a package for",
        ) from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(files)), path
