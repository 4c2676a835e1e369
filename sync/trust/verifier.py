"""The node's side of TUF: asks for metadata, verifies it and hands out desired states and manifests.

Owns python-tuf's client: a new `Updater` per poll (it refreshes once), fed by our own transport. Its folder is a cache;
what must never go back is checked by `rules` against the journal. Synchronous: called from the agent's own thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from tuf.api import exceptions as tuf
from tuf.api.metadata import Metadata, TargetFile, Targets
from tuf.api.serialization import DeserializationError
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from common.clock import Clock
from common.errors import AttackRefused, FetchError, MetadataExpired, SyncError, TrustError
from sync.disk import write_atomic
from sync.manifests import packed_name, unpack
from sync.release import Desired, Manifest, desired_path, manifest_path, parse_manifest, read_desired, read_manifest
from sync.store import TIMESTAMP
from sync.trust.keys import DESIRED
from sync.trust.repository import stored_name
from sync.trust.signing import TOP
from sync.trust.time import Reading, raise_time, read_signed_at, read_time

logger = logging.getLogger(__name__)

Read = Callable[[str], Iterator[bytes]]  # a signed file by name, in chunks; FetchError (permanent: not there)

_SCHEME: Final = "sync:///"
_MANIFESTS: Final = "releases/"
_FRAME_BYTES: Final = 64 << 10  # a frame may be longer than what is in it, by far less than this
_REFUSED: Final = ("UNAUTHENTICATED", "PERMISSION_DENIED")  # the service's own word to this node: it did answer
_MAX_ROOTS: Final = 1 << 14  # since the first one: a node may have been away for as long as it likes


class Verifier:
    """Turns what a server says into what may be believed."""

    def __init__(self, folder: Path, root: bytes, read: Read, clock: Clock) -> None:
        self._metadata, self._targets = folder / "metadata", folder / "targets"
        self._root, self._fetcher, self._clock = root, _Fetcher(read), clock

    def refresh(self, floor: datetime | None = None) -> View:
        """Verified metadata of now. Raises `FetchError`, `MetadataExpired`, `AttackRefused` or `TrustError`.

        `floor`: the newest time that signed metadata proved so far (`View.signed_at`): a clock before it is wrong, and
        so is one before the first root was signed.
        """
        self._metadata.mkdir(parents=True, exist_ok=True)
        self._targets.mkdir(parents=True, exist_ok=True)
        clock = self._clock.now()
        with _named(self._fetcher, read_time(clock, floor)):
            updater = Updater(
                str(self._metadata),
                f"{_SCHEME}metadata/",
                str(self._targets),
                f"{_SCHEME}targets/",
                self._fetcher,
                UpdaterConfig(max_root_rotations=_MAX_ROOTS),
                bootstrap=self._root,
            )
            floor = raise_time(floor, read_signed_at(updater._trusted_set.root))
            reading = read_time(clock, floor)
            # The library takes the time from the system; an agent's clock may be better than that (or a test's).
            updater._trusted_set.reference_time = reading.now
            try:
                updater.refresh()
                updater.get_targetinfo(desired_path("-"))  # loads the delegated role, whichever name is asked for
            except tuf.ExpiredMetadataError as exc:
                raise _expired(exc, read_time(clock, raise_time(floor, _signed_at(updater)))) from exc
        return View(updater, self._metadata, self._fetcher, reading)


class View:
    """One verified state of the repository."""

    def __init__(self, updater: Updater, folder: Path, fetcher: _Fetcher, reading: Reading) -> None:
        self._updater, self._folder, self._fetcher = updater, folder, fetcher
        self.time = reading  # as it was believed for this view
        self._used: set[str] = set()
        self._manifests: dict[str, str] = {}  # of what is desired now

    def versions(self) -> Mapping[str, int]:
        """Version of each role's metadata, as just verified: the root's too, without which withdrawn keys come back,
        and those that the snapshot binds every other role to, whether it was asked for or not."""
        versions = {role: int(self._signed(role).version) for role in TOP if role != "targets"}
        bound = self._signed("snapshot").meta
        return versions | {name.removesuffix(".json"): int(meta.version) for name, meta in bound.items()}

    def signed_at(self) -> datetime | None:
        """It is not earlier than this; None where the metadata does not say."""
        return read_signed_at(self._signed("timestamp"))

    def models(self) -> tuple[str, ...]:
        """Every model that a desired state is signed for."""
        online = self._signed(DESIRED)
        assert isinstance(online, Targets)
        names = (path.removeprefix("desired/").removesuffix(".json") for path in online.targets)
        return tuple(sorted(name for name in names if desired_path(name) in online.targets))

    def desired(self, model: str) -> Desired | None:
        """None when nothing is signed for that model. Raises `BadRelease`."""
        data = self._target(desired_path(model))
        if data is None:
            return None
        desired = read_desired(data, model)
        self._manifests[model] = desired.manifest
        return desired

    def manifest(self, desired: Desired) -> Manifest:
        """Raises `BadRelease`, `IncompatibleRelease`, or `AttackRefused` when nobody signed the manifest."""
        data = self._target(desired.manifest, packed_to=self._cached_manifests(desired.model))
        if data is None:
            problem = f"{desired.manifest} is desired, but no release of that name is signed"
            raise AttackRefused("arbitrary software", problem)
        return read_manifest(data, desired)

    def release(self, model: str, version: str) -> Manifest | None:
        """The signed manifest of any release, desired or not; None where there is none to be had."""
        try:
            data = self._target(manifest_path(model, version), packed_to=self._cached_manifests(model))
            return None if data is None else parse_manifest(data, f"{model}/{version}")
        except SyncError as exc:
            logger.debug("no manifest of %s/%s: %s", model, version, exc)
            return None

    def prune(self) -> None:
        """Removes cached desired states that nobody asked this view for, and manifests once there is a newer one: what
        is signed next travels as a difference to them."""
        kept = set(self._used)
        for model, path in self._manifests.items():
            newest = self._cache(path)
            kept |= {newest.name} if newest.exists() else {one.name for one in self._cached_manifests(model)}
        for one in self._cache("-").parent.iterdir():
            if one.name not in kept:
                one.unlink(missing_ok=True)

    def _target(self, path: str, *, packed_to: Sequence[Path] = ()) -> bytes | None:
        """`packed_to`: other manifests, against which this one may have been packed."""
        with _named(self._fetcher, self.time):
            info = self._updater.get_targetinfo(path)
            if info is None:
                return None
            file = self._updater.find_cached_target(info)
            if file is None and path.startswith(_MANIFESTS):
                self._fetch_packed(info, packed_to)
                file = self._updater.find_cached_target(info)
            data = Path(file or self._updater.download_target(info)).read_bytes()
            info.verify_length_and_hashes(data)
        self._used.add(self._cache(path).name)
        return data

    def _fetch_packed(self, info: TargetFile, bases: Sequence[Path]) -> None:
        """Puts what it unpacks to where the library looks for it, and checks it. Else it comes as it was signed."""
        for base in (*(one.read_bytes() for one in bases), b""):
            frame = self._fetcher.side_file(packed_name(stored_name(info), base), most=info.length + _FRAME_BYTES)
            if frame is None:
                continue
            try:
                data = unpack(frame, base, most=info.length)
                info.verify_length_and_hashes(data)
            except (ValueError, tuf.LengthOrHashMismatchError) as exc:
                logger.warning("%s as it travels: %s", info.path, exc)
                continue
            write_atomic(self._cache(info.path), data)
            return

    def _cached_manifests(self, model: str) -> list[Path]:
        start = quote(f"{_MANIFESTS}{model}/", safe="")
        found = self._cache("-").parent.iterdir()
        return sorted(one for one in found if one.name.startswith(start) and not one.name.startswith("."))

    def _cache(self, path: str) -> Path:
        """As python-tuf names them."""
        return Path(self._updater.target_dir or "") / quote(path, safe="")

    def _signed(self, role: str) -> Any:
        return Metadata[Any].from_file(str(self._folder / f"{role}.json")).signed


class _Fetcher(FetcherInterface):
    """python-tuf's transport, over ours. Keeps the last transport error: the library wraps it beyond recognition."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.failure: FetchError | None = None
        self.missing: str | None = None

    def side_file(self, name: str, *, most: int) -> bytes | None:
        """An unsigned file beside a signed one; None where there is none, or more of it than makes sense."""
        data = bytearray()
        try:
            for chunk in self._read(name):
                data += chunk
                if len(data) > most:
                    return None
        except FetchError as exc:
            if exc.is_permanent:
                return None
            raise
        return bytes(data)

    def _fetch(self, url: str) -> Iterator[bytes]:
        name = url.removeprefix(_SCHEME)
        try:
            yield from self._read(name)
        except FetchError as exc:
            if exc.is_permanent:
                self.missing = name
                raise tuf.DownloadHTTPError(str(exc), 404) from exc
            self.failure = exc if type(exc) is not FetchError else _unanswered(exc)
            raise tuf.DownloadError(str(exc)) from exc


def _signed_at(updater: Updater) -> datetime | None:
    """The newest time that is proven, by whatever could be verified before it went wrong."""
    newest = None
    for signed in updater._trusted_set:
        newest = raise_time(newest, read_signed_at(signed))
    return newest


def _unanswered(exc: FetchError) -> FetchError:
    if exc.problem.startswith(_REFUSED):
        return exc
    return FetchError(exc.what, f"{exc.problem} (an outage, or a drop requests attack)")


def _expired(exc: Exception, reading: Reading) -> MetadataExpired:
    return MetadataExpired(f"{exc}; {reading} (if the clock is wrong, set it right: nothing is lost)")


@contextlib.contextmanager
def _named(fetcher: _Fetcher, reading: Reading) -> Iterator[None]:
    """python-tuf's errors as ours; a refusal says which attack it stops."""
    fetcher.failure = fetcher.missing = None
    try:
        yield
    except tuf.DownloadLengthMismatchError as exc:
        raise AttackRefused("endless data", str(exc)) from exc
    except tuf.DownloadHTTPError as exc:
        is_named = fetcher.missing != TIMESTAMP
        why = "; signed metadata names it (a partial bundle attack, or a store that is not whole)" if is_named else ""
        raise FetchError("metadata", f"{exc}{why}", is_permanent=True) from exc
    except tuf.DownloadError as exc:
        raise fetcher.failure or FetchError("metadata", str(exc)) from exc
    except tuf.ExpiredMetadataError as exc:
        raise _expired(exc, reading) from exc
    except tuf.BadVersionNumberError as exc:
        raise AttackRefused("rollback", str(exc)) from exc
    except tuf.LengthOrHashMismatchError as exc:
        raise AttackRefused("mix-and-match", f"a file is not the one that signed metadata names: {exc}") from exc
    except tuf.UnsignedMetadataError as exc:
        raise AttackRefused("arbitrary software", str(exc)) from exc
    except DeserializationError as exc:
        raise AttackRefused("denial of service", f"the answer is no metadata: {exc}") from exc
    except (tuf.RepositoryError, ValueError) as exc:
        raise TrustError(f"metadata is not to be believed: {exc}") from exc
