"""The node's cache of answers on its disk: survives restarts, never blocks the event loop, never unpickles.

diskcache keeps the rows; its default would unpickle values and follow file names that a row gives. `_RawDisk` accepts
inline bytes only, in both directions, and each value is framed with its digest. The only importer of diskcache.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sqlite3
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import MODE_RAW

from common.bundle import CacheRules
from common.config import from_json, to_json
from common.errors import OutriderError
from common.request import Privacy, Request, Response, Stamp
from common.serving.answer_cache import Lookup, cache_key, request_digest
from common.serving.repository import Repository
from common.telemetry.events import CacheFault, CacheLookup, Hook, ignore
from common.tensors import TensorSpec, datatype_of, pack, unpack

_log = logging.getLogger(__name__)
_MAGIC = b"OAC1"
_INLINE = 1 << 40  # diskcache moves larger values to files: none is
_MAX_PENDING = 64  # reads, and writes, that wait for the disk; more are not tried, a cache may forget
_FAULTS = (OSError, sqlite3.Error, diskcache.Timeout)
PATIENCE_S = 0.25
MAX_ANSWER_BYTES = 4 << 20


class DiskCache:
    """An async context. The current version of a model comes from `repository`: another version's answer never fits."""

    name = "cache"

    def __init__(
        self, folder: Path, repository: Repository, *, by: str, quota_bytes: int = 256 << 20, on_event: Hook = ignore
    ) -> None:
        self._folder, self._repository, self._by = folder, repository, by
        self._quota_bytes, self._on_event = quota_bytes, on_event
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="disk-cache")
        self._reading = self._writing = 0
        self._rows: diskcache.Cache | None = None

    async def __aenter__(self) -> DiskCache:
        await self._on_thread(self._open)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._on_thread(self._close)
        self._thread.shutdown(wait=False)

    async def lookup(self, request: Request) -> Lookup:
        """A disk that does not answer within `PATIENCE_S` (or half of what the caller has left) is a miss."""
        rules = self._rules(request)
        version = request.context.pin or self._current_version(request.model)
        if rules is None or version is None or self._reading >= _MAX_PENDING:
            return Lookup()
        patience_s = min(PATIENCE_S, (request.context.deadline - time.monotonic()) / 2)
        self._reading += 1
        reading = asyncio.get_running_loop().run_in_executor(self._thread, self._find, request, version, rules)
        reading.add_done_callback(self._read_done)
        try:
            async with asyncio.timeout(patience_s):
                found = await asyncio.shield(reading)
        except TimeoutError:
            self._on_event(CacheFault(problem=f"no answer from the disk within {patience_s:.3f} s"))
            found = Lookup()
        self._on_event(CacheLookup(model=request.model, is_hit=found.response is not None))
        return found

    def store(self, request: Request, response: Response, digest: bytes | None) -> None:
        rules = self._rules(request)
        if rules is None or response.stamp.model != request.model or self._writing >= _MAX_PENDING:
            return
        self._writing += 1
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, self._write, request, response, digest, rules).add_done_callback(self._wrote)

    def _read_done(self, done: asyncio.Future[Lookup]) -> None:
        self._reading -= 1
        self._report_failure(done)

    def _wrote(self, done: asyncio.Future[None]) -> None:
        self._writing -= 1
        self._report_failure(done)

    def _report_failure(self, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and (problem := done.exception()) is not None:
            self._on_event(CacheFault(problem=str(problem)))

    def _current_version(self, model: str) -> str | None:
        loaded = self._repository.current(model)
        return loaded.version if loaded else None

    def _rules(self, request: Request) -> CacheRules | None:
        """The model owner's rules; None where this answer may not be kept, or where nobody has said."""
        config = self._repository.config(request.model)
        if config is None or config.cache.ttl_s <= 0:
            return None
        is_private = request.context.privacy is Privacy.DEVICE_ONLY
        return None if is_private and not config.cache.keep_device_only else config.cache

    async def _on_thread(self, call: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # --- on the cache's thread ---

    def _open(self) -> None:
        """Without a usable folder the node serves on, uncached."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._folder.chmod(0o700)
            self._rows = diskcache.Cache(
                str(self._folder),
                disk=_RawDisk,
                disk_min_file_size=_INLINE,
                eviction_policy="least-recently-stored",
                size_limit=self._quota_bytes,
                sqlite_synchronous=0,
                statistics=0,
                timeout=PATIENCE_S,
            )
        except _FAULTS as exc:
            self._fault("cannot be opened, serving without it", exc)

    def _close(self) -> None:
        if self._rows is not None:
            self._rows.close()

    def _find(self, request: Request, version: str, rules: CacheRules) -> Lookup:
        digest = request_digest(request)
        key = cache_key(request, version, digest, is_public=rules.is_public)
        return Lookup(self._read(key), digest)

    def _read(self, key: str) -> Response | None:
        if self._rows is None:
            return None
        try:
            data = self._rows.get(key)
            return None if data is None else _decode(data, key, self.name, self._by)
        except _FAULTS as exc:
            self._fault("cannot be read", exc)
        except (_BadRow, OutriderError) as exc:
            self._fault("holds a damaged row, removed", exc)
            self._remove(key)
        return None

    def _write(self, request: Request, response: Response, digest: bytes | None, rules: CacheRules) -> None:
        if self._rows is None:
            return
        version = response.stamp.version
        key = cache_key(request, version, digest or request_digest(request), is_public=rules.is_public)
        data = _encode(response, key)
        if len(data) > MAX_ANSWER_BYTES:
            return
        try:
            self._rows.set(key, data, expire=rules.ttl_s)
        except _FAULTS as exc:
            self._fault("cannot be written", exc)

    def _remove(self, key: str) -> None:
        try:
            if self._rows is not None:
                self._rows.delete(key)
        except _FAULTS as exc:
            self._fault("cannot remove a row", exc)

    def _fault(self, what: str, exc: Exception) -> None:
        _log.warning("disk cache %s %s: %s", self._folder, what, exc)
        self._on_event(CacheFault(problem=f"{what}: {exc}"))


class _BadRow(Exception):
    """A row that this cache did not write."""


class _RawDisk(diskcache.Disk):  # type: ignore[misc]
    """Inline raw bytes under text keys and nothing else: no pickles, no files."""

    def put(self, key: Any) -> tuple[Any, bool]:
        if not isinstance(key, str):
            raise _BadRow(f"key of type {type(key).__name__}")
        return key, True

    def get(self, key: Any, raw: bool) -> Any:
        if not raw or not isinstance(key, str):
            raise _BadRow("a key that is not text")
        return key

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, None, Any]:
        if not isinstance(value, bytes):
            raise _BadRow(f"value of type {type(value).__name__}")
        return 0, MODE_RAW, None, sqlite3.Binary(value)

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> bytes:
        if mode != MODE_RAW or filename is not None or not isinstance(value, bytes):
            raise _BadRow("a row that is not inline bytes")
        return value

    def filename(self, key: Any = None, value: Any = None) -> tuple[str, str]:
        raise _BadRow("values are never kept in files")

    def remove(self, file_path: str) -> None:
        """Rows of ours have no files; a planted file name is not followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    key: str
    model: str
    version: str
    tensors: tuple[TensorSpec, ...]
    sizes: tuple[int, ...]


def _encode(response: Response, key: str) -> bytes:
    """magic, SHA-256 of the rest, header length, JSON header, tensors."""
    parts = [pack(array) for array in response.outputs.values()]
    header = to_json(
        _Header(
            key=key,
            model=response.stamp.model,
            version=response.stamp.version,
            tensors=tuple(
                TensorSpec(name=name, datatype=datatype_of(array), shape=array.shape)
                for name, array in response.outputs.items()
            ),
            sizes=tuple(len(part) for part in parts),
        )
    )
    body = b"".join((struct.pack("<I", len(header)), header, *parts))
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(data: bytes, key: str, target: str, by: str) -> Response:
    if data[:4] != _MAGIC or hashlib.sha256(data[36:]).digest() != data[4:36]:
        raise _BadRow("digest does not match")
    (length,) = struct.unpack_from("<I", data, 36)
    offset = 40 + length
    header = from_json(data[40:offset], _Header, "cached answer")
    if header.key != key:
        raise _BadRow("the answer to another request")
    outputs = {}
    for spec, size in zip(header.tensors, header.sizes, strict=True):
        outputs[spec.name] = unpack(data[offset : offset + size], spec.datatype, spec.shape, spec.name)
        offset += size
    return Response(outputs=outputs, stamp=Stamp(target=target, model=header.model, version=header.version, by=by))
