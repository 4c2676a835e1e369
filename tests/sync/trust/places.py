"""A signed store with its keys in folders of the test's choice, and nodes that look at it."""

from __future__ import annotations

from pathlib import Path

from sync.release import Desired, desired_path, manifest_path, to_bytes
from sync.store import Store
from sync.trust.keys import Keys
from sync.trust.repository import Repository
from sync.trust.rotation import Rotation
from sync.trust.verifier import Verifier, View
from tests.sync.fakes import FakeClock, StoreSource


class Place:
    """Its first keys lie in `keys`; `folders` are further ones that commands are given."""

    def __init__(self, folder: Path, *folders: str) -> None:
        self.folder, self.clock = folder, FakeClock()
        self.store = Store(folder / "store")
        self.keys = Keys(Keys.create(folder / "keys").folder, *(folder / name for name in folders))
        self.repository = Repository(self.store, self.keys, clock=self.clock)
        self.root = self.repository.create()
        self.source = StoreSource(self.store)

    def node(self, name: str = "node") -> Verifier:
        return Verifier(self.folder / name, self.root, self.source.read, self.clock)

    def rotation(self) -> Rotation:
        return Rotation(self.store, self.keys, self.repository)

    def publish(self, model: str = "digits", version: int = 1) -> None:
        """A desired state, and a manifest that nothing here looks into."""
        path = manifest_path(model, str(version))
        desired = Desired(
            model=model, epoch=version, version=str(version), digest="aa" * 32, manifest=path, manifest_hash="bb" * 32
        )
        self.repository.add({path: f"{model} {version}".encode()}, {desired_path(model): to_bytes(desired)})


def served(view: View, model: str = "digits") -> str | None:
    """The version that the node is to have, if it also gets what is signed of it."""
    desired = view.desired(model)
    is_there = desired is not None and view._target(desired.manifest) is not None
    return desired.version if desired is not None and is_there else None
