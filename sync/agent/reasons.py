"""What an error means for a model: the reason code that `outrider sync why` shows, and what would change it."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Final

from common.errors import (
    BadRelease,
    BuildTimedOut,
    EngineUnavailable,
    FetchError,
    FolderUnusable,
    IncompatibleRelease,
    NoSpace,
    SyncError,
    TrustError,
    Unavailable,
)
from sync.agent.states import Code

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def code_of(exc: BaseException) -> Code:
    if isinstance(exc, FetchError):
        return Code.SOURCE if exc.is_permanent else Code.NETWORK
    if isinstance(exc, NoSpace | FolderUnusable) or (isinstance(exc, OSError) and exc.errno in _FULL):
        return Code.DISK_FULL
    if isinstance(exc, BuildTimedOut):
        return Code.BUILD_FAILED
    if isinstance(exc, EngineUnavailable | Unavailable):
        return Code.NOT_READY
    if isinstance(exc, IncompatibleRelease):
        return Code.NO_VARIANT
    if isinstance(exc, BadRelease | TrustError):
        return Code.BAD_RELEASE
    return Code.SOURCE if isinstance(exc, SyncError) else Code.BUILD_FAILED


WAY_OUT: Final[Mapping[Code, str]] = {
    Code.NONE: "a release that is desired for it",
    Code.NEW: "nothing is needed: it is on its way",
    Code.SERVES: "another desired release",
    Code.WINDOW: "the window opens",
    Code.DISK_FULL: "free space on the node's disk",
    Code.CLOCK: "the node's clock is set",
    Code.NETWORK: "the sync service answers again",
    Code.SOURCE: "the store is whole again (`outrider sync verify` at the publisher)",
    Code.NOT_READY: "the engine can be used again",
    Code.NO_VARIANT: "a release with a variant that this node runs, or another setting of its engines and variants",
    Code.BAD_RELEASE: "another desired release",
    Code.BUILD_FAILED: "another desired release",
    Code.GATE_FAILED: "another desired release, or another engine or variant on this node",
    Code.ERRORS: "another desired release",
    Code.LATENCY: "another desired release",
    Code.CRASHES: "another desired release",
    Code.DAMAGED: "nothing is needed: what is damaged is fetched again at the next poll",
    Code.RESTART: "nothing is needed: it goes on",
}
