"""The node's side of TUF: asks for metadata, verifies it and hands out desired states and manifests.

Owns python-tuf's client: a new `Updater` per poll (it refreshes once), fed by our own transport. Its folder is a cache;
what must never go back is checked by `rules` against the journal. Synchronous: called from the agent's own thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tuf.api import exceptions as tuf
from tuf.api.metadata import Metadata, Targets
from tuf.ngclient import FetcherInterface, Updater

from common.clock import Clock
from common.errors import AttackRefused, FetchError, MetadataExpired, TrustError
from sync.release import Desired, Manifest, desired_path, read_desired, read_manifest
from sync.trust.keys import DESIRED

Read = Callable[[str], Iterator[bytes]]  # a signed file by name, in chunks; FetchError (permanent: not there)

_SCHEME: Final = "sync:///"
_FLOORED: Final = ("timestamp", "snapshot", "targets", DESIRED)


class Verifier:
    """Turns what a server says into what may be believed."""

    def __init__(self, folder: Path, root: bytes, read: Read, clock: Clock) -> None:
        self._metadata, self._targets = folder / "metadata", folder / "targets"
        self._root, self._fetcher, self._clock = root, _Fetcher(read), clock

    def refresh(self) -> View:
        """Verified metadata of now. Raises `FetchError`, `MetadataExpired`, `AttackRefused` or `TrustError`."""
        self._metadata.mkdir(parents=True, exist_ok=True)
        self._targets.mkdir(parents=True, exist_ok=True)
        with _named(self._fetcher):
            updater = Updater(
                str(self._metadata),
                f"{_SCHEME}metadata/",
                str(self._targets),
                f"{_SCHEME}targets/",
                self._fetcher,
                bootstrap=self._root,
            )
            # The library takes the time from the system; an agent's clock may be better than that (or a test's).
            updater._trusted_set.reference_time = self._clock.now()
            updater.refresh()
            updater.get_targetinfo(desired_path("-"))  # loads the delegated role, whichever name is asked for
        return View(updater, self._metadata, self._fetcher)


class View:
    """One verified state of the repository."""

    def __init__(self, updater: Updater, folder: Path, fetcher: _Fetcher) -> None:
        self._updater, self._folder, self._fetcher = updater, folder, fetcher
        self._used: set[str] = set()

    def versions(self) -> Mapping[str, int]:
        """Version of each role's metadata, as just verified."""
        return {role: int(self._signed(role).version) for role in _FLOORED}

    def models(self) -> tuple[str, ...]:
        """Every model that a desired state is signed for."""
        online = self._signed(DESIRED)
        assert isinstance(online, Targets)
        names = (path.removeprefix("desired/").removesuffix(".json") for path in online.targets)
        return tuple(sorted(name for name in names if desired_path(name) in online.targets))

    def desired(self, model: str) -> Desired | None:
        """None when nothing is signed for that model. Raises `BadRelease`."""
        data = self._target(desired_path(model))
        return None if data is None else read_desired(data, model)

    def manifest(self, desired: Desired) -> Manifest:
        """Raises `BadRelease`, `IncompatibleRelease`, or `AttackRefused` when nobody signed the manifest."""
        data = self._target(desired.manifest)
        if data is None:
            problem = f"{desired.manifest} is desired, but no release of that name is signed"
            raise AttackRefused("arbitrary software", problem)
        return read_manifest(data, desired)

    def _target(self, path: str) -> bytes | None:
        with _named(self._fetcher):
            info = self._updater.get_targetinfo(path)
            if info is None:
                return None
            file = Path(self._updater.find_cached_target(info) or self._updater.download_target(info))
            data = file.read_bytes()
            info.verify_length_and_hashes(data)
        self._used.add(file.name)
        return data

    def prune(self) -> None:
        """Removes cached manifests and desired states that nobody asked this view for."""
        for path in Path(self._updater.target_dir or "").iterdir():
            if path.name not in self._used:
                path.unlink(missing_ok=True)

    def _signed(self, role: str) -> Any:
        return Metadata[Any].from_file(str(self._folder / f"{role}.json")).signed


class _Fetcher(FetcherInterface):
    """python-tuf's transport, over ours. Keeps the last transport error: the library wraps it beyond recognition."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.failure: FetchError | None = None

    def _fetch(self, url: str) -> Iterator[bytes]:
        name = url.removeprefix(_SCHEME)
        try:
            yield from self._read(name)
        except FetchError as exc:
            if exc.is_permanent:
                raise tuf.DownloadHTTPError(str(exc), 404) from exc
            self.failure = exc
            raise tuf.DownloadError(str(exc)) from exc


@contextlib.contextmanager
def _named(fetcher: _Fetcher) -> Iterator[None]:
    """python-tuf's errors as ours; a refusal says which attack it stops."""
    fetcher.failure = None
    try:
        yield
    except tuf.DownloadLengthMismatchError as exc:
        raise AttackRefused("endless data", str(exc)) from exc
    except tuf.DownloadHTTPError as exc:
        raise FetchError("metadata", str(exc), is_permanent=True) from exc
    except tuf.DownloadError as exc:
        raise fetcher.failure or FetchError("metadata", str(exc)) from exc
    except tuf.ExpiredMetadataError as exc:
        raise MetadataExpired(str(exc)) from exc
    except tuf.BadVersionNumberError as exc:
        raise AttackRefused("rollback", str(exc)) from exc
    except tuf.LengthOrHashMismatchError as exc:
        raise AttackRefused("mix-and-match", f"a file is not the one that signed metadata names: {exc}") from exc
    except tuf.UnsignedMetadataError as exc:
        raise AttackRefused("arbitrary software", str(exc)) from exc
    except (tuf.RepositoryError, ValueError) as exc:
        raise TrustError(f"metadata is not to be believed: {exc}") from exc
