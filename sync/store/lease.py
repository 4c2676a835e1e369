"""One writer at a time in an object store: a lock object with owner and expiry, changed only under conditions.

The owner renews it in a thread of its own and stops writing by itself once it has not managed to for `LEASE_S`. Others
take over when they have watched the object unchanged for `TAKEOVER_S` on their own monotonic clock (or, where clocks
agree at least to `SKEW_S`, when its expiry is that long past): longer than a lease and a request that is still under
way. What decides in the end is the condition on timestamp.json (`sync/store/object_store.py`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from common.errors import BucketError, LeaseLost, StoreBusy
from sync.store.bucket import Bucket, Stored

logger = logging.getLogger(__name__)

NAME: Final = "lock"
LEASE_S: Final = 20.0
TAKEOVER_S: Final = 45.0
SKEW_S: Final = 300.0
_RENEW_S: Final = LEASE_S / 4
_LOOK_S: Final = 0.5
_FREE: Final = json.dumps({"owner": "", "until": 0}).encode()


@dataclass(slots=True, kw_only=True)
class Lease:
    """Held until `ends_at` (monotonic), and on for as long as it is renewed."""

    where: str
    owner: str
    e_tag: str
    ends_at: float
    is_lost: bool = False

    def check(self, now: float) -> None:
        """Raises `LeaseLost` when nothing may be written any more."""
        if self.is_lost or now >= self.ends_at:
            raise LeaseLost(self.where, "the writer's lock was lost")


@contextlib.contextmanager
def held(bucket: Bucket, wait_s: float, *, now: Callable[[], float] = time.monotonic) -> Iterator[Lease]:
    """The lock, within `wait_s`. Raises `StoreBusy`, naming who has it."""
    lease = _acquired(bucket, wait_s, now)
    stop = threading.Event()
    thread = threading.Thread(target=_renewing, args=(bucket, lease, stop, now), name="store-lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        stop.set()
        thread.join()
        with contextlib.suppress(BucketError):  # it ends by itself
            bucket.swap(NAME, _FREE, lease.e_tag)


def _acquired(bucket: Bucket, wait_s: float, now: Callable[[], float]) -> Lease:
    owner = f"{socket.gethostname()}, process {os.getpid()}, {secrets.token_hex(4)}"
    end = now() + wait_s
    seen, since = "", now()
    tried_at = since
    while True:
        started = now()
        found = bucket.get(NAME)
        if found is not None and _owner(found) == owner:  # it is ours, and the answer was lost on the way
            return Lease(where=bucket.address, owner=owner, e_tag=found.e_tag, ends_at=tried_at + LEASE_S)
        tried_at = started
        if found is None:
            e_tag = bucket.create(NAME, _content(owner))
        else:
            seen, since = (seen, since) if found.e_tag == seen else (found.e_tag, started)
            is_free = _is_free(found) or started - since >= TAKEOVER_S
            e_tag = bucket.swap(NAME, _content(owner), found.e_tag) if is_free else None
        if e_tag is not None:
            return Lease(where=bucket.address, owner=owner, e_tag=e_tag, ends_at=started + LEASE_S)
        if now() >= end:
            raise StoreBusy(f"{bucket.address}/{NAME}{_holder(found)}", wait_s)
        time.sleep(max(0.0, min(_LOOK_S, end - now())))


def _renewing(bucket: Bucket, lease: Lease, stop: threading.Event, now: Callable[[], float]) -> None:
    while not stop.wait(_RENEW_S):
        started = now()
        try:
            renew(bucket, lease, started)
        except BucketError as exc:
            logger.warning("the writer's lock is not renewed now: %s", exc)
        if lease.is_lost:
            return


def renew(bucket: Bucket, lease: Lease, now: float) -> None:
    """Once. An answer that was lost on the way is found out by reading."""
    content = _content(lease.owner)
    e_tag = bucket.swap(NAME, content, lease.e_tag)
    if e_tag is None:
        found = bucket.get(NAME)
        e_tag = found.e_tag if found is not None and _owner(found) == lease.owner else None
    if e_tag is None:
        lease.is_lost = True
    else:
        lease.e_tag, lease.ends_at = e_tag, now + LEASE_S


def _content(owner: str) -> bytes:
    return json.dumps({"owner": owner, "until": time.time() + LEASE_S}).encode()


def _is_free(found: Stored) -> bool:
    try:
        content = json.loads(found.data)
        return not content["owner"] or time.time() > float(content["until"]) + SKEW_S
    except (ValueError, TypeError, KeyError):
        return False


def _owner(found: Stored) -> str:
    try:
        return str(json.loads(found.data)["owner"])
    except (ValueError, TypeError, KeyError):
        return ""


def _holder(found: Stored | None) -> str:
    owner = "" if found is None else _owner(found)
    return f" (held by {owner})" if owner else ""
