"""A store in an S3 bucket: the same names as in a folder (`sync/store/`), so nodes and web servers find the same.

Objects are created if absent, packs go up in parts, and timestamp.json comes last, under the condition that it still is
the one that was there when the writer's lock was taken: of two writers that both believe in their lock one is refused,
and whoever reads sees the old state or the new one. Publishing lists nothing. What a cut upload leaves behind is never
referred to; parts of it go by the bucket's lifecycle rule for incomplete uploads.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from common.errors import LeaseLost
from sync.store import TIMESTAMP, StoredFile, index_name, is_within, object_name, pack_name
from sync.store.bucket import Bucket
from sync.store.lease import Lease, held

TIMEOUT_S: Final = 20.0  # of a request: well below what others wait before they take the lock


class ObjectStore:
    """Reads and writes by name; knows nothing of what the bytes mean. `address`: s3://bucket/prefix."""

    writers: int = 16  # each waits for two answers
    look_s: float = 5.0  # between two looks for a new timestamp: each is a request that costs

    def __init__(self, address: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._bucket = Bucket(address, timeout_s=timeout_s)
        self._sizes: dict[str, int] = {}  # of objects, while the lock is held: nobody else takes them out
        self._lease: Lease | None = None
        self._fence: str | None = None  # the tag of timestamp.json that may be replaced
        self._one_at_a_time = threading.Lock()

    @property
    def root(self) -> str:
        return self._bucket.address

    def where(self, name: str = "") -> str:
        return f"{self._bucket.address}/{name}" if name else self._bucket.address

    # --- slab objects ---

    def put_full(self, slab: str, data: bytes) -> bool:
        self._check()
        is_new = self._bucket.create(object_name(slab), data) is not None
        if is_new:
            self._remember(slab, len(data))
        return is_new

    def drop_full(self, slab: str) -> None:
        self.remove(object_name(slab))
        self._sizes.pop(slab, None)

    def full(self, slab: str) -> bytes | None:
        return self._whole(object_name(slab))

    def full_bytes(self, slab: str) -> int | None:
        if slab not in self._sizes:
            size = self._bucket.size(object_name(slab))
            if size is None:
                return None
            self._remember(slab, size)
            return size
        return self._sizes[slab]

    # --- packs ---

    @contextlib.contextmanager
    def new_pack(self, target: str, base: str) -> Iterator[BinaryIO]:
        """A file on this machine, which goes up when the block has ended well."""
        with tempfile.TemporaryDirectory(prefix="outrider-pack-") as folder:
            path = Path(folder) / "pack"
            with path.open("wb") as file:
                yield file
            self._check()
            self._bucket.put(pack_name(target, base), path)

    @contextlib.contextmanager
    def open_pack(self, target: str, base: str) -> Iterator[BinaryIO | None]:
        found = self._bucket.stream(pack_name(target, base))
        if found is None:
            yield None
            return
        with tempfile.TemporaryFile(prefix="outrider-pack-") as file:
            for chunk in found.chunks:
                file.write(chunk)
            file.seek(0)
            yield file

    def put_index(self, target: str, base: str, data: bytes) -> None:
        self.replace(index_name(target, base), data)

    def index(self, target: str, base: str) -> bytes | None:
        return self._whole(index_name(target, base))

    def drop_pack(self, target: str, base: str) -> None:
        for name in (index_name(target, base), pack_name(target, base)):
            self.remove(name)

    def part(self, name: str, offset: int, length: int) -> tuple[int, bytes] | None:
        """As `Store.part`."""
        if not is_within(name, ("objects", "packs")):
            return None
        if length <= 0 or offset >= 1 << 62:
            size = self._bucket.size(name)
            return None if size is None else (size, b"")
        found = self._bucket.get(name, start=offset, length=length)
        return None if found is None else (found.size, found.data)

    # --- everything ---

    def files(self, *folders: str) -> Iterator[StoredFile]:
        """Every object under `folders`. Lists the bucket."""
        for folder in folders or ("",):
            for name, size, modified in self._bucket.names(folder):
                yield StoredFile(name=name, size=size, modified=modified)

    def size(self, name: str) -> int | None:
        return self._bucket.size(name)

    def remove(self, name: str) -> None:
        self._check()
        self._bucket.remove(name)

    def remove_empty(self, folder: str) -> None:
        """There are no folders."""

    # --- signed files ---

    def read(self, name: str) -> bytes | None:
        return self._whole(name) if is_within(name, ("metadata", "targets")) else None

    def replace(self, name: str, data: bytes) -> None:
        """Over an older one; timestamp.json only where nobody else has replaced it since the lock was taken."""
        self._check()
        if name != TIMESTAMP or self._lease is None:
            self._bucket.put(name, data)
            return
        made = self._bucket.create(name, data) if self._fence is None else self._bucket.swap(name, data, self._fence)
        if made is None:
            found = self._bucket.get(name)
            if found is None or found.data != data:  # else it is ours, and the answer was lost on the way
                raise LeaseLost(self.where(), "another writer has signed a new state meanwhile")
            made = found.e_tag
        self._fence = made

    def sync(self) -> None:
        """What was written is durable."""

    @contextlib.contextmanager
    def lock(self, wait_s: float = 60.0) -> Iterator[None]:
        """One writer at a time, across machines. Raises `StoreBusy` after `wait_s`."""
        with self._one_at_a_time, held(self._bucket, wait_s) as lease:
            self._sizes.clear()
            self._lease, self._fence = lease, self._bucket.e_tag(TIMESTAMP)
            try:
                yield
            finally:
                self._lease = None
                self._sizes.clear()

    def _whole(self, name: str) -> bytes | None:
        found = self._bucket.get(name)
        return None if found is None else found.data

    def _remember(self, slab: str, size: int) -> None:
        if self._lease is not None:
            self._sizes[slab] = size

    def _check(self) -> None:
        """No write once the lock may be another's."""
        if self._lease is not None:
            self._lease.check(time.monotonic())
