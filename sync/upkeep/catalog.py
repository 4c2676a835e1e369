"""What a store has of what is signed: the releases whose manifests are here, and what each model should serve.

A release that is listed while its manifest is gone was collected: it is no release any more. Only reads; whoever
removes something after it has looked holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import BadRelease, IncompatibleRelease, TrustError
from sync.release import Desired, Manifest, parse_manifest, read_desired
from sync.store.stores import AnyStore
from sync.trust.chain import Chain, Listed

_RELEASES, _DESIRED, _JSON = "releases/", "desired/", ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRelease:
    """A release that is signed; its manifest may be gone."""

    model: str
    version: int
    file: Listed

    @property
    def name(self) -> str:
        return f"{self.model}/{self.version}"


class Catalog:
    """The releases of a chain, in the store that it was read from."""

    def __init__(self, store: AnyStore, chain: Chain) -> None:
        self._store, self.chain = store, chain
        self.releases = tuple(_releases(chain.targets))

    def models(self) -> dict[str, list[ListedRelease]]:
        """The releases of each model, newest first."""
        found: dict[str, list[ListedRelease]] = {}
        for one in sorted(self.releases, key=lambda release: release.version, reverse=True):
            found.setdefault(one.model, []).append(one)
        return found

    def desired(self) -> dict[str, Desired]:
        """Of every model that has a desired state. Raises `BadRelease` where one is missing or damaged."""
        found = {}
        for one in self.chain.targets:
            if one.path.startswith(_DESIRED):
                model = one.path.removeprefix(_DESIRED).removesuffix(_JSON)
                found[model] = read_desired(self.data(one, f"{model} (desired state)"), model)
        return found

    def manifest(self, release: ListedRelease) -> Manifest:
        """Raises `BadRelease` where it is missing or damaged."""
        data = self.data(release.file, release.name)
        try:
            return parse_manifest(data, release.name)
        except IncompatibleRelease as exc:
            raise BadRelease(release.name, exc.problem) from exc

    def is_here(self, release: ListedRelease) -> bool:
        return self._store.size(release.file.name) is not None

    def data(self, listed: Listed, what: str) -> bytes:
        """A target's bytes, as signed. Raises `BadRelease`."""
        data = self._store.read(listed.name)
        if data is None:
            raise BadRelease(what, f"{listed.name} is not in the store: it was collected, or lost")
        problem = listed.problem(data)
        if problem is not None:
            raise BadRelease(what, f"{listed.name} {problem}")
        return data


def sound_catalog(store: AnyStore, chain: Chain) -> Catalog:
    """Raises `TrustError` where the chain is broken: what nobody can read, nobody can count on either."""
    if chain.problems:
        broken = "; ".join(f"{name} {problem}" for name, problem in sorted(chain.problems.items()))
        raise TrustError(f"{store.where()}: {broken}; restore it from a backup")
    return Catalog(store, chain)


def _releases(targets: Iterable[Listed]) -> Iterable[ListedRelease]:
    for one in targets:
        model, _, version = one.path.removeprefix(_RELEASES).removesuffix(_JSON).rpartition("/")
        if one.path.startswith(_RELEASES) and model and version.isascii() and version.isdigit():
            yield ListedRelease(model=model, version=int(version), file=one)
