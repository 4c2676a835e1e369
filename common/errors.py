"""Every error that Outrider raises, as one tree.

Each error builds its own message (what happened, to what, what would be accepted) and keeps the facts as
attributes. Transport codes are not here: `common/transport/status.py` maps this tree to HTTP and gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable


class OutriderError(Exception):
    """Root of all errors of the project."""


# --- a request that cannot be answered as it stands: never retried, never falls back, trips no breaker ---


class InvalidRequest(OutriderError):
    """The caller sent something that no target would accept."""


class InvalidInput(InvalidRequest):
    """An input of a request has a wrong name, shape, dtype or byte count.

    `where` names the place (for example ``inputs[0].shape``), `accepted` what would have been right.
    """

    def __init__(self, where: str, problem: str, accepted: str = "") -> None:
        self.where, self.problem, self.accepted = where, problem, accepted
        super().__init__(f"{where}: {problem}" + (f"; accepted: {accepted}" if accepted else ""))


class OutsideProfile(InvalidRequest):
    """An input is well formed but outside the shapes or the batch that the model's config declares."""

    def __init__(self, model: str, problem: str, accepted: str) -> None:
        self.model, self.problem, self.accepted = model, problem, accepted
        super().__init__(f"model {model!r}: {problem}; accepted: {accepted}")


class NotFound(OutriderError):
    """Something that was named does not exist here."""


class ModelNotFound(NotFound):
    def __init__(self, model: str, known: Iterable[str] = ()) -> None:
        self.model, self.known = model, tuple(sorted(known))
        has = ", ".join(self.known) if self.known else "none"
        super().__init__(f"model {model!r} is not known here; known models: {has}")


class VersionNotFound(NotFound):
    def __init__(self, model: str, version: str, known: Iterable[str] = ()) -> None:
        self.model, self.version, self.known = model, version, tuple(sorted(known))
        has = ", ".join(self.known) if self.known else "none"
        super().__init__(f"model {model!r} has no version {version!r} here; versions served: {has}")


# --- who calls: never retried, never falls back, trips no breaker; no key is ever part of a message ---


class Unauthenticated(OutriderError):
    """The call brings no API key where one is needed, or one that is not known there."""


class Forbidden(OutriderError):
    """The caller's key is known, but what it asks for is not its to ask."""


# --- right request, wrong moment: another target or a later try may answer ---


class Unavailable(OutriderError):
    """Nothing here can answer now. `retry_after_s` is a hint to the caller, in seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class ModelNotReady(Unavailable):
    """The model is known, but no engine for it is up (unloaded, or being built)."""

    def __init__(self, model: str, state: str, *, retry_after_s: float = 1.0) -> None:
        self.model, self.state = model, state
        super().__init__(f"model {model!r} is not ready: {state}", retry_after_s=retry_after_s)


class Overloaded(Unavailable):
    """A queue is full; the request was refused before any work was done on it."""

    def __init__(self, what: str, *, queued: int, limit: int, retry_after_s: float = 1.0) -> None:
        self.what, self.queued, self.limit = what, queued, limit
        super().__init__(f"{what} is overloaded: {queued} rows queued, limit {limit}", retry_after_s=retry_after_s)


class TargetUnreachable(Unavailable):
    """A remote target (gateway, worker) refused, broke or never answered."""

    def __init__(self, target: str, problem: str, *, retry_after_s: float = 1.0) -> None:
        self.target, self.problem = target, problem
        super().__init__(f"target {target!r} cannot be reached: {problem}", retry_after_s=retry_after_s)


class DeadlineExceeded(OutriderError):
    """The caller's deadline passed (or certainly would have) before an answer was there."""

    def __init__(self, model: str, where: str) -> None:
        self.model, self.where = model, where
        super().__init__(f"model {model!r}: the deadline passed {where}")


class EngineError(OutriderError):
    """An engine raised, or answered with something that is not one output row per input row."""

    def __init__(self, model: str, problem: str) -> None:
        self.model, self.problem = model, problem
        super().__init__(f"engine of model {model!r} failed: {problem}")


# --- set-up ---


class ConfigError(OutriderError):
    """A configuration value is wrong. `path` is the full path of the key, `accepted` what would be right."""

    def __init__(self, source: str, path: str, problem: str, accepted: str = "") -> None:
        self.source, self.path, self.problem, self.accepted = source, path, problem, accepted
        at = f"{source}: {path}" if path else source
        super().__init__(f"{at}: {problem}" + (f"; accepted: {accepted}" if accepted else ""))


class EngineUnavailable(OutriderError):
    """The named engine cannot run on this machine (library missing, no device)."""

    def __init__(self, engine: str, problem: str) -> None:
        self.engine, self.problem = engine, problem
        super().__init__(f"engine {engine!r} is not available here: {problem}")


# --- building a bundle ---


class BuildError(OutriderError):
    """A bundle could not be built."""


class BundleError(BuildError):
    """A bundle folder is incomplete or damaged."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"bundle {path}: {problem}")


class CalibrationMissing(BuildError):
    """Static quantization was asked for without calibration data."""

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(
            f"model {model!r}: static INT8 quantization needs calibration inputs and none were given; "
            "name a safetensors file with one array per model input"
        )


class GateRefused(BuildError):
    """A build (or a staged release) is not accurate enough to be served. `worst_layers` is worst first."""

    def __init__(
        self,
        model: str,
        *,
        metric: str,
        loss: float,
        allowed: float,
        detail: str = "",
        worst_layers: Iterable[str] = (),
    ) -> None:
        self.model, self.metric, self.loss, self.allowed = model, metric, loss, allowed
        self.detail, self.worst_layers = detail, tuple(worst_layers)
        text = f"model {model!r}: {metric} loss {loss:.4f} is over the allowed {allowed:.4f}"
        if detail:
            text += f"; {detail}"
        if self.worst_layers:
            text += f"; worst layers: {', '.join(self.worst_layers)}"
        super().__init__(text)


# --- the parameter path ---


class SyncError(OutriderError):
    """Root of the parameter path's errors."""


class CorruptSlab(SyncError):
    """A slab's payload or its decoded bytes do not have the digest (or the form) that they should have."""

    def __init__(self, slab: str, problem: str) -> None:
        self.slab, self.problem = slab, problem
        super().__init__(f"slab {slab}: {problem}")


class CorruptPack(SyncError):
    """The index of a pack is not what docs/formats/slab.md asks for: its slabs travel as `full`."""

    def __init__(self, base: str, target: str, problem: str) -> None:
        self.base, self.target, self.problem = base, target, problem
        super().__init__(f"pack from {base} to {target}: {problem}")


class FileChanged(SyncError):
    """A file did not stand still while it was read."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"{path} changed while it was being read; accepted: a file that nobody writes to")


class FetchError(SyncError):
    """The sync service could not be reached or broke off. Transient unless `is_permanent`."""

    def __init__(self, what: str, problem: str, *, is_permanent: bool = False) -> None:
        self.what, self.problem, self.is_permanent = what, problem, is_permanent
        super().__init__(f"fetching {what}: {problem}")


class SlowSource(FetchError):
    """Bytes came slower than the floor: a slow retrieval attack, or a link that is as good as down. Try again later."""

    def __init__(self, what: str, *, received: int, seconds: float, floor_bytes_s: float) -> None:
        self.received, self.seconds, self.floor_bytes_s = received, seconds, floor_bytes_s
        came = f"{received} bytes in {seconds:.0f} s"
        super().__init__(what, f"slow retrieval: {came}; accepted: at least {floor_bytes_s:g} bytes/s")


class FetchCancelled(SyncError):
    """Whoever asked for a release does not want it any more. What has come stays where it is."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"fetching {what} was cancelled")


class TrustError(SyncError):
    """Metadata is unsigned, expired, rolled back or otherwise not to be believed."""


class AttackRefused(TrustError):
    """Metadata or a release shows the sign of a known attack. `attack` names it (rollback, mix-and-match ...)."""

    def __init__(self, attack: str, problem: str) -> None:
        self.attack, self.problem = attack, problem
        super().__init__(f"{attack} attack refused: {problem}")


class MetadataExpired(TrustError):
    """Signed metadata is past its expiry: nothing new is installed, what is installed goes on serving."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(
            f"metadata has expired (or is being held back, a freeze attack): {problem}; a publisher must sign again"
        )


class KeyMissing(TrustError):
    """The private key of a role is not here (or not private), so nothing can be signed for it."""

    def __init__(self, role: str, problem: str) -> None:
        self.role, self.problem = role, problem
        super().__init__(f"key of role {role!r}: {problem}")


class BadRelease(SyncError):
    """A signed manifest is malformed: its publisher is at fault, fetching again would not help."""

    def __init__(self, release: str, problem: str) -> None:
        self.release, self.problem = release, problem
        super().__init__(f"release {release}: {problem}")


class StoreBusy(SyncError):
    """Another process holds the one-writer lock of a store or of an agent's folder."""

    def __init__(self, path: str, waited_s: float) -> None:
        self.path, self.waited_s = path, waited_s
        super().__init__(f"{path} is locked by another process (waited {waited_s:g} s)")


class FolderUnusable(SyncError):
    """A folder of our own state is full, read-only or damaged. What serves goes on serving; nothing new comes."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path} cannot be used: {problem}; accepted: a sound disk with free space, open to writing")


class NoSpace(SyncError):
    """A release does not fit on the disk. Nothing was fetched; it is tried again."""

    def __init__(self, path: str, needed: int, free: int) -> None:
        self.path, self.needed, self.free = path, needed, free
        super().__init__(f"{path} has no room: {needed} bytes are needed, {free} are free")


class BuildTimedOut(SyncError):
    """Preparing or gating a release took too long. It is tried again, within the attempts that a release has."""

    def __init__(self, what: str, seconds: float) -> None:
        self.what, self.seconds = what, seconds
        super().__init__(f"{what} was given up after {seconds:g} s")


class IncompatibleRelease(SyncError):
    """No variant of the release runs on this node."""

    def __init__(self, model: str, version: str, problem: str) -> None:
        self.model, self.version, self.problem = model, version, problem
        super().__init__(f"release {model}/{version} cannot run here: {problem}")


class IdentityRefused(TrustError):
    """A certificate, a signing request, an enrolment token or a name is not accepted. No token is part of a message."""

    def __init__(self, name: str, problem: str) -> None:
        self.name, self.problem = name, problem
        super().__init__(f"identity {name!r} refused: {problem}")


class EavesdropRefused(FetchError):
    """Whoever answers at the service's address is not the service: nothing was said to them. Tried again later."""

    attack = "eavesdrop"

    def __init__(self, what: str, address: str, problem: str) -> None:
        self.address = address
        super().__init__(what, f"eavesdrop attack refused: {address} does not show our CA's certificate: {problem}")


class BucketError(SyncError):
    """An object store did not do what was asked of it. Transient unless `is_permanent`."""

    def __init__(self, name: str, problem: str, *, is_permanent: bool = False) -> None:
        self.name, self.problem, self.is_permanent = name, problem, is_permanent
        super().__init__(f"{name}: {problem}")


class LeaseLost(SyncError):
    """A writer of an object store was silent for so long that another one may have taken over."""

    def __init__(self, store: str, problem: str) -> None:
        self.store, self.problem = store, problem
        super().__init__(f"{store}: {problem}; nothing of what was being written is visible, publish again")


class TransferRefused(SyncError):
    """A release that was carried here in a file is not taken in: the store is what it was."""

    def __init__(self, file: str, problem: str) -> None:
        self.file, self.problem = file, problem
        super().__init__(f"{file} is not imported: {problem}")


class CheckpointRefused(SyncError):
    """What a trainer wrote is no checkpoint, or not a whole one yet."""

    def __init__(self, name: str, problem: str) -> None:
        self.name, self.problem = name, problem
        super().__init__(f"checkpoint {name}: {problem}")
