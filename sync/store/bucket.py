"""One prefix of an S3 bucket: objects read, written and, the point of it, written under a condition. Owns `obstore`.

Credentials, region and endpoint come from the environment alone (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
``AWS_SESSION_TOKEN``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``, ``AWS_SKIP_SIGNATURE`` ...): no address has them in it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from common.errors import BucketError, ConfigError

SCHEME: Final = "s3://"
_ADDRESS: Final = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/+[A-Za-z0-9!_.*'()=-]+)*)/*")
_RETRIES: Final = 3
_CHUNK_BYTES: Final = 64 << 10
_PART_BYTES: Final = 8 << 20
_PARTS_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What was read of an object: `size` is the whole object's."""

    size: int
    data: bytes
    e_tag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The same, as it comes."""

    size: int
    e_tag: str
    chunks: Iterator[bytes]


class Bucket:
    """`address` is s3://bucket/prefix. `timeout_s`: of one request; a few are made where the first fails."""

    def __init__(self, address: str, *, timeout_s: float, retries: int = _RETRIES) -> None:
        found = _ADDRESS.fullmatch(address)
        if found is None or ".." in address:
            raise ConfigError("store", address, "is not the address of a bucket", "s3://BUCKET[/PREFIX]")
        prefix = "/".join(part for part in found[2].split("/") if part)
        self.address = f"{SCHEME}{found[1]}" + (f"/{prefix}" if prefix else "")
        self._obstore = _obstore(address)
        endpoint = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", ""))
        limits: Any = {"retry_timeout": timedelta(seconds=timeout_s), "max_retries": retries}
        client: Any = {"timeout": timedelta(seconds=timeout_s), "allow_http": endpoint.startswith("http://")}
        from obstore.store import S3Store

        with self._errors(""):
            self._store = S3Store(found[1], prefix=prefix or None, client_options=client, retry_config=limits)

    def get(self, name: str, *, start: int = 0, length: int | None = None) -> Stored | None:
        """What the object has of a range (`length` None: the rest); None where there is none of that name."""
        found = self.stream(name, start=start, length=length)
        return None if found is None else Stored(size=found.size, data=b"".join(found.chunks), e_tag=found.e_tag)

    def stream(self, name: str, *, start: int = 0, length: int | None = None) -> Stream | None:
        """What the object has of a range (`length` None: the rest), in chunks; None where there is no such object."""
        options: Any = {"range": (start, start + length)} if length else {"range": {"offset": start}} if start else None
        try:
            with self._errors(name):
                found = self._obstore.get(self._store, name, options=options)
        except FileNotFoundError:
            return None
        except BucketError:
            size = self.size(name) if start else None
            if size is None or start < size:
                raise
            return Stream(size=size, e_tag="", chunks=iter(()))  # the object ends before the range begins
        meta = found.meta
        return Stream(size=int(meta["size"]), e_tag=meta["e_tag"] or "", chunks=self._chunks(name, found))

    def size(self, name: str) -> int | None:
        found = self._head(name)
        return None if found is None else int(found["size"])

    def e_tag(self, name: str) -> str | None:
        found = self._head(name)
        return None if found is None else str(found["e_tag"])

    def put(self, name: str, data: bytes | Path) -> None:
        """Over an older one. A file goes in parts, and the object appears when all of them are there."""
        with self._errors(name):
            self._obstore.put(self._store, name, data, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    def create(self, name: str, data: bytes) -> str | None:
        """The new object's tag; None where one of that name is there already (If-None-Match)."""
        from obstore.exceptions import AlreadyExistsError

        try:
            with self._errors(name):
                return str(self._obstore.put(self._store, name, data, mode="create")["e_tag"])
        except AlreadyExistsError:
            return None

    def swap(self, name: str, data: bytes, e_tag: str) -> str | None:
        """Over the object with that tag; None where another is there by now (If-Match)."""
        from obstore.exceptions import PreconditionError

        try:
            with self._errors(name):
                return str(self._obstore.put(self._store, name, data, mode={"e_tag": e_tag})["e_tag"])
        except (PreconditionError, FileNotFoundError):
            return None

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._errors(name):
            self._obstore.delete(self._store, name)

    def names(self, folder: str) -> Iterator[tuple[str, int, float]]:
        """Name, size and time of change (seconds since 1970) of everything below `folder` ("": everything)."""
        with self._errors(folder):
            for found in self._obstore.list(self._store, prefix=folder or None):
                for one in found:
                    yield str(one["path"]), int(one["size"]), one["last_modified"].timestamp()

    def _head(self, name: str) -> Any:
        try:
            with self._errors(name):
                return self._obstore.head(self._store, name)
        except FileNotFoundError:
            return None

    def _chunks(self, name: str, found: Any) -> Iterator[bytes]:
        with self._errors(name):
            for chunk in found.stream(min_chunk_size=_CHUNK_BYTES):
                yield bytes(chunk)

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """The library's errors as ours, but for those that say what was found."""
        from obstore import exceptions

        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as exc:
            problem = f"{_first_line(exc)}; the credentials in the environment (AWS_...) have to allow it"
            raise BucketError(f"{self.address}/{name}", problem, is_permanent=True) from exc
        except exceptions.BaseError as exc:
            raise BucketError(f"{self.address}/{name}", _first_line(exc)) from exc


def _obstore(address: str) -> Any:
    try:
        import obstore
    except ImportError as exc:
        accepted = "`pip install 'outrider[s3]'`, or a store in a folder or behind a web server"
        raise ConfigError("store", address, "needs the package obstore, which is not installed", accepted) from exc
    return obstore


def _first_line(exc: Exception) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0].partition(" <?xml")[0].rstrip(": ")[:300]
