"""The node's cache of answers on its disk: survives restarts, never blocks the event loop, never fails a call.

Owns what may be kept and for whom, the one thread that the disk has, and what happens when it fails: each fault is
counted, a damaged database is begun anew, a disk that is full or slow is tried once a second, a folder that cannot be
used once a minute. Leaves rows and their form to `disk_rows.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from common.bundle import CacheRules
from common.clock import BootClock, SystemBootClock
from common.request import Privacy, Request, Response, Stamp
from common.serving.answer_cache import CACHE, Lookup, cache_key, request_digest
from common.serving.repository import Repository
from common.telemetry.events import CacheFault, CacheLookup, Hook, ignore
from edge.disk_rows import MAX_ANSWER_BYTES, AnswerRows, BadRow, discard, is_damage, open_rows
from edge.known_keys import KeyFilter, KnownKeys

T = TypeVar("T")

PATIENCE_S = 0.25
RETRY_S = 60.0  # after which a folder that could not be used is tried again
PAUSE_S = 1.0  # after which a read or write is tried again, where these failed
_MAX_READING = 256  # reads that wait for the disk; more are not tried
_MAX_WRITING_BYTES = 32 << 20  # answers that wait for the disk; more are forgotten
_SMALL_BYTES = 64 << 10  # inputs whose digest is made on the event loop: in tens of microseconds
_PAGE = 500  # keys that are read before the next look-up or write has its turn
_NOTHING = Lookup()


@dataclass(slots=True, kw_only=True)
class _Listing:
    """A reading of all keys in the database, a page at a time."""

    older: KeyFilter | None
    keys: KeyFilter = field(default_factory=KeyFilter)
    last: str = ""


class DiskCache:
    """An async context. The current version of a model comes from `repository`: another version's answer never fits."""

    def __init__(
        self,
        folder: Path,
        repository: Repository,
        *,
        by: str,
        quota_bytes: int = 256 << 20,
        on_event: Hook = ignore,
        clock: BootClock | None = None,
    ) -> None:
        self._folder, self._repository, self._by = folder, repository, by
        self._quota_bytes, self._on_event = quota_bytes, on_event
        self._clock = clock or SystemBootClock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="disk-cache")
        self._reading = self._writing_bytes = 0
        self._rows: AnswerRows | None = None
        self._known = KnownKeys()
        self._listing: _Listing | None = None
        self._is_listing = False
        self._try_again_s = self._healed_s = float("-inf")  # of the clock's `boot_s`
        self._failing: dict[str, float] = {}  # until when what failed is not tried again

    async def __aenter__(self) -> DiskCache:
        """Without a usable folder the node serves on, uncached."""
        await self._on_thread(lambda: self._attempt("cannot be opened", lambda rows: None))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._on_thread(self._close)
        self._thread.shutdown(wait=False)

    async def lookup(self, request: Request) -> Lookup:
        """A disk that does not answer within `PATIENCE_S` (or half of what the caller has left) is a miss.

        A miss that is certain from memory waits for nothing: whoever asks then finds the flight that is under way.
        """
        rules = self._rules(request)
        version, identity = self._who_answers(request)
        patience_s = min(PATIENCE_S, (request.context.deadline - time.monotonic()) / 2)
        if rules is None or version is None or patience_s <= 0:
            return _NOTHING
        try:
            asked = self._asked(request, version, identity, rules) if _is_small(request) else None
        except Exception as exc:  # inputs that no engine takes either
            self._on_event(CacheFault(problem=f"{self._folder}: {exc}"))
            return _NOTHING
        if asked is not None and asked.key is not None and not self._known.may_have(asked.key):
            self._on_event(CacheLookup(model=request.model, is_hit=False))
            return asked
        if self._reading >= _MAX_READING:
            return _NOTHING
        self._reading += 1
        reading = asyncio.get_running_loop().run_in_executor(
            self._thread, self._find, request, asked, version, identity, rules
        )
        reading.add_done_callback(self._read_done)
        try:
            async with asyncio.timeout(patience_s):
                found = await asyncio.shield(reading)
        except TimeoutError:
            if patience_s == PATIENCE_S:  # else it is the caller that is in a hurry
                self._on_event(CacheFault(problem=f"{self._folder} does not answer within {patience_s} s"))
            found = _NOTHING
        except Exception:  # reported when the read is done; a cache may fail, but no call because of it
            found = _NOTHING
        self._on_event(CacheLookup(model=request.model, is_hit=found.response is not None))
        return found

    def store(self, request: Request, response: Response, digest: bytes | None) -> asyncio.Future[None] | None:
        rules = self._rules(request)
        if digest is None or rules is None or response.stamp.model != request.model:
            return None
        size = sum(array.nbytes for array in response.outputs.values())
        fits = size <= MAX_ANSWER_BYTES and self._writing_bytes + size <= _MAX_WRITING_BYTES
        key = self._key(request, response.stamp.version, response.stamp.identity, digest, rules)
        if fits and self._known.add(key):
            self._list_anew()
        work = (lambda: self._write(key, response)) if fits else _nothing  # in its turn: the look-ups before it missed
        self._writing_bytes += size
        writing = asyncio.get_running_loop().run_in_executor(self._thread, work)
        writing.add_done_callback(lambda done: self._wrote(done, size))
        return writing

    def _read_done(self, done: asyncio.Future[Lookup]) -> None:
        self._reading -= 1
        self._report_failure(done)

    def _wrote(self, done: asyncio.Future[None], size: int) -> None:
        self._writing_bytes -= size
        self._report_failure(done)

    def _report_failure(self, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and (problem := done.exception()) is not None:
            self._on_event(CacheFault(problem=f"{self._folder}: {problem}"))

    def _who_answers(self, request: Request) -> tuple[str | None, str]:
        """The version that would, and the identity of the engine here where it has that version."""
        loaded = self._repository.current(request.model)
        version = request.context.pin or (loaded.version if loaded else None)
        return version, loaded.identity if loaded and loaded.version == version else ""

    def _rules(self, request: Request) -> CacheRules | None:
        """The model owner's rules; None where this answer may not be kept, or where nobody has said."""
        config = self._repository.config(request.model)
        if config is None or config.cache.ttl_s <= 0:
            return None
        is_private = request.context.privacy is Privacy.DEVICE_ONLY
        return None if is_private and not config.cache.keep_device_only else config.cache

    def _asked(self, request: Request, version: str, identity: str, rules: CacheRules) -> Lookup:
        digest = request_digest(request)
        return Lookup(digest=digest, key=self._key(request, version, identity, digest, rules), version=version)

    def _key(self, request: Request, version: str, identity: str, digest: bytes, rules: CacheRules) -> str:
        """A DEVICE_ONLY answer is its tenant's own, also where the model's answers are public."""
        is_private = request.context.privacy is Privacy.DEVICE_ONLY
        is_public = rules.is_public and not is_private
        return cache_key(request, version, digest, is_public=is_public, identity=identity)

    async def _on_thread(self, call: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # --- on the cache's thread ---

    def _find(self, request: Request, asked: Lookup | None, version: str, identity: str, rules: CacheRules) -> Lookup:
        asked = asked or self._asked(request, version, identity, rules)
        key, model = str(asked.key), request.model
        found = self._attempt("cannot be read", lambda rows: rows.read(key, model, version, rules.ttl_s, identity))
        if self._known.is_unread and not self._is_listing and self._rows is not None:
            self._list_anew()
        if found is None:
            return asked
        stamp = Stamp(target=CACHE, model=model, version=version, by=self._by, identity=identity)
        return structs.replace(asked, response=Response(outputs=found.outputs, stamp=stamp))

    def _write(self, key: str, response: Response) -> None:
        self._attempt("cannot be written", lambda rows: rows.write(key, response))

    def _list_anew(self) -> None:
        """Behind all that waits for the thread: what is being written by now is then in the database."""
        self._is_listing = True
        with contextlib.suppress(RuntimeError):  # the cache closes
            self._thread.submit(self._list, _Listing(older=self._known.older))

    def _list(self, listing: _Listing) -> None:
        self._listing = listing
        self._list_on()

    def _list_on(self) -> None:
        listing = self._listing
        if listing is None or self._rows is None:
            self._is_listing = False
            return
        page = self._attempt("cannot be listed", lambda rows: rows.keys_after(listing.last, _PAGE))
        if self._listing is not listing:  # the database has been opened anew meanwhile
            return
        for key in page or ():
            listing.keys.add(key)
        if page:
            listing.last = page[-1]
            with contextlib.suppress(RuntimeError):
                self._thread.submit(self._list_on)
            return
        self._listing, self._is_listing = None, False
        if page is not None:
            self._known.replace(listing.keys, listing.older)

    def _close(self) -> None:
        rows, self._rows, self._listing = self._rows, None, None
        if rows is not None:
            rows.close()

    def _attempt(self, problem: str, work: Callable[[AnswerRows], T]) -> T | None:
        """`work` on the database, which is opened first where it is due; None where that fails. Never raises."""
        now_s = self._clock.moment().boot_s
        if now_s < self._failing.get(problem, now_s) or (self._rows is None and now_s < self._try_again_s):
            return None
        try:
            rows = self._rows = self._rows or self._open()
            result = work(rows)
        except BadRow as exc:
            self._fault("refused a row, which is removed", exc)
            return None
        except Exception as exc:  # whatever a damaged or hostile file makes of SQLite and the library
            is_new = problem not in self._failing
            self._fault(problem, exc, is_new=is_new)
            self._failing[problem] = now_s if is_damage(exc) else now_s + PAUSE_S
            self._recover(exc, now_s)
            return None
        self._failing.pop(problem, None)
        return result

    def _open(self) -> AnswerRows:
        """Raises what `open_rows` does where a new database does not help, or did not help a moment ago."""
        try:
            rows = open_rows(self._folder, self._quota_bytes, self._clock)
        except Exception as exc:
            if not is_damage(exc):
                raise
            self._fault("is damaged and begun anew", exc)
            discard(self._folder)
            rows = open_rows(self._folder, self._quota_bytes, self._clock)
        self._known.forget()
        self._listing = None
        self._list_anew()
        if rows.removed:
            self._on_event(CacheFault(problem=f"{self._folder} had {rows.removed} rows of others, which are removed"))
        return rows

    def _recover(self, exc: Exception, now_s: float) -> None:
        if self._rows is None:
            self._try_again_s = now_s + RETRY_S
        elif is_damage(exc):
            try:
                self._close()
                discard(self._folder)
            except Exception as problem:
                self._fault("cannot be closed", problem)
            self._try_again_s = max(now_s, self._healed_s + RETRY_S)
            self._healed_s = now_s

    def _fault(self, what: str, exc: Exception, *, is_new: bool = True) -> None:
        self._on_event(CacheFault(problem=f"{self._folder} {what}: {exc or type(exc).__name__}", is_new=is_new))


def _is_small(request: Request) -> bool:
    size = 0
    for array in request.inputs.values():
        if array.dtype.hasobject:  # strings: counting them takes as long as a digest of a few
            size += sum(map(len, array.flat)) if array.size <= 64 else _SMALL_BYTES
        size += array.nbytes
    for value in request.parameters.values():
        size += len(value) if isinstance(value, str) else 0
    return size <= _SMALL_BYTES


def _nothing() -> None:
    return None
