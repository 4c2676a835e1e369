"""Takes a carried file into a store: verified as a node verifies, from a root that this store trusts already.

Metadata has to lead from that root to every file, not to have expired, and to be no older than what is here; each slab
has to decode to its id. Objects come first and timestamp.json last: what is refused half-way is never visible, and
whatever it left behind is sound and goes with the next garbage collection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from blake3 import blake3

from common.clock import Clock
from common.errors import AttackRefused, BadRelease, CorruptPack, CorruptSlab, FetchError, TrustError
from sync.manifests import pack, packed_name
from sync.release import Desired, desired_path
from sync.store import TIMESTAMP
from sync.store.stores import AnyStore
from sync.transfer.carried import Carried
from sync.transfer.slabs import Slabs
from sync.transfer.verified import FIRST_ROOT, sound_chain, verified
from sync.trust.chain import Chain
from sync.trust.rules import check_epoch, raise_floors
from sync.upkeep.catalog import Catalog

_REFUSALS = (TrustError, FetchError, BadRelease, CorruptSlab, CorruptPack)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenIn:
    """`not_here`: releases that are desired too, and neither in the file nor in the store."""

    releases: dict[str, str]
    slabs_new: int
    not_here: tuple[str, ...]
    expires: Mapping[str, datetime]  # by role, as signed


def take_in(file: Path, store: AnyStore, *, root: bytes | None = None, clock: Clock, wait_s: float = 60.0) -> TakenIn:
    """`root`: the first root.json, brought here by a trusted way; None: the one that the store has.

    Raises `TransferRefused`; the store then serves what it did. `StoreBusy` when another writer has it.
    """
    with Carried.opened(file) as carried, store.lock(wait_s):
        try:
            return _taken_in(carried, store, _trusted(carried, store, root), clock)
        except _REFUSALS as exc:
            raise carried.refused(str(exc)) from exc


def _trusted(carried: Carried, store: AnyStore, root: bytes | None) -> bytes:
    own = store.read(FIRST_ROOT)
    if own is None and root is None:
        raise carried.refused(f"{store.where()} trusts nobody yet: give --root, the first root.json of the publisher")
    if own is not None and root not in (None, own):
        raise carried.refused(f"--root is another root than that of {store.where()}")
    trusted = own or root or b""
    if carried.read(FIRST_ROOT) != trusted:
        raise carried.refused("it does not begin at the root that is trusted here: another publisher's, or forged")
    return trusted


def _taken_in(carried: Carried, store: AnyStore, root: bytes, clock: Clock) -> TakenIn:
    with verified(root, carried.fetch, clock) as view:
        chain = sound_chain(carried, "what is signed in it does not hold together")
        own = _own_chain(store)
        _check_newer(carried, chain, store, own)
        desired = {model: one for model in view.models() if (one := view.desired(model)) is not None}
        manifests = {}
        for model, version in carried.label.releases.items():
            if model not in desired or desired[model].version != version:
                raise BadRelease(f"{model}/{version}", "is said to be in it, but is not what is signed")
            manifests[model] = view.manifest(desired[model])
    catalog = Catalog(store, own)
    before = catalog.desired()
    for model, one in desired.items():
        check_epoch(before.get(model), one)
    slabs_new = Slabs(carried, store, catalog).take(tuple(manifests.values()))
    for model in manifests:
        name = _manifest_name(carried, chain, desired[model])
        last = before.get(model)
        bases = [] if last is None else [one.name for one in own.targets if one.path == last.manifest]
        _put_manifest(carried, store, name, [one for one in bases if one != name])
    names = {one.path: one.name for one in chain.targets}
    _put_signed(carried, store, [names[desired_path(model)] for model in desired])
    _put_signed(carried, store, [one.name for one in chain.files if one.name != TIMESTAMP])
    store.sync()
    _put_signed(carried, store, [TIMESTAMP])
    store.sync()
    missing = [one for one in desired.values() if store.size(names.get(one.manifest, one.manifest)) is None]
    return TakenIn(
        releases=dict(carried.label.releases),
        slabs_new=slabs_new,
        not_here=tuple(f"{one.model}/{one.version}" for one in missing),
        expires={one.role: one.expires for one in chain.files},
    )


def _manifest_name(carried: Carried, chain: Chain, desired: Desired) -> str:
    """Of the one that is desired, where two roles have signed something of that path."""
    for one in chain.targets:
        data = carried.read(one.name) if one.path == desired.manifest else None
        if data is not None and blake3(data).hexdigest() == desired.manifest_hash:
            return one.name
    raise FetchError(desired.manifest, "is not in the file", is_permanent=True)


def _own_chain(store: AnyStore) -> Chain:
    if store.read(TIMESTAMP) is None:
        return Chain(files=(), targets=(), problems={}, keys={})
    return sound_chain(store, f"{store.where()} (not the file) is damaged; `outrider sync verify` says more")


def _check_newer(carried: Carried, chain: Chain, store: AnyStore, own: Chain) -> None:
    """Raises `AttackRefused` when it is older than what is here, or says something else under the same version."""
    floors, here = _versions(own), {one.name for one in own.files}
    raise_floors(floors, _versions(chain))
    for one in chain.files:
        is_same = one.name in here and floors.get(one.role) == one.version
        if is_same and store.read(one.name) != carried.read(one.name):
            raise AttackRefused("mix-and-match", f"{one.name} is another file than the one of that version here")


def _versions(chain: Chain) -> dict[str, int]:
    """The newest by role."""
    found: dict[str, int] = {}
    for one in chain.files:
        found[one.role] = max(one.version, found.get(one.role, 0))
    return found


def _put_manifest(carried: Carried, store: AnyStore, name: str, bases: list[str]) -> None:
    """And the shorter ways to it, for nodes that have none or the one before."""
    data = carried.read(name) or b""
    for base in (b"", *(store.read(one) for one in bases)):
        if base is not None:
            store.replace(packed_name(name, base), pack(data, base))
    store.replace(name, data)


def _put_signed(carried: Carried, store: AnyStore, names: list[str]) -> None:
    for name in names:
        data = carried.read(name)
        if data is None:
            raise FetchError(name, "is not in the file", is_permanent=True)
        store.replace(name, data)
