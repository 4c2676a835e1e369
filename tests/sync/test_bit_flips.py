"""A flipped bit in any file of a store or of a node: refused or healed, never served.

Every file that is there is tried, whatever it is: a new kind of file is covered the day it is written. What is served
is held against the digests that were signed before anything was damaged.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from sync.agent.failpoints import stopping
from sync.store import Store
from tests.sync.fakes import FakeInstaller, Killed, StoreSource, World, trained, weights

MODEL = "digits"
SEEDS = (1,)


class Checking(FakeInstaller):
    """Serves nothing that is not what was signed. `digests`: by version and file."""

    digests: dict[str, dict[str, str]]

    def activate(self, prepared: Any) -> None:
        for name, digest in self.digests[prepared.version].items():
            assert blake3((prepared.folder / name).read_bytes()).hexdigest() == digest, name
        super().activate(prepared)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Three releases, differences between them; a node (`node`) that serves 1 and died on its way to 2; one (`there`)
    that serves 3, and 2 before."""
    world = World(tmp_path_factory.mktemp("flips"))
    tensors = weights(rows=8)
    world.publish(tensors)
    with world.agent(FakeInstaller()) as agent, world.agent(FakeInstaller(), "there") as other:
        assert agent.run_once()
        assert other.run_once()
    world.publish(tensors := trained(tensors, seed=1))
    with world.agent(FakeInstaller()) as agent, stopping(die), pytest.raises(Killed):
        agent.run_once()
    with world.agent(FakeInstaller(), "there") as other:
        assert other.run_once()
        world.publish(trained(tensors, "fc.weight", seed=2))
        assert other.run_once()
    Checking.digests = {}
    for version in ("1", "2", "3"):
        manifest = world.publisher.manifest(MODEL, version)
        assert manifest is not None
        names = manifest.files_for(manifest.variants[0], "onnxruntime")
        Checking.digests[version] = {file.path: file.digest for file in manifest.files if file.path in names}
    return world


def die(name: str) -> None:
    if name == "slab written":
        raise Killed


def files(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.stat().st_size
    )


def flip(path: Path, seed: int) -> bytes:
    """What the file was before."""
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[random.Random(f"{path.name} {seed}").randrange(len(whole))] ^= 1 << seed % 8
    path.write_bytes(damaged)
    return whole


def until_served(world: World, node: str, version: str, polls: int = 3) -> Checking:
    """Restores and polls, as a process that starts; what is served is checked on the way."""
    installer = Checking()
    with world.agent(installer, node) as agent:
        agent.restore()
        for _ in range(polls):
            agent.run_once()
            if installer.serving.get(MODEL) == version:
                break
    return installer


@pytest.mark.parametrize("seed", SEEDS)
def test_a_flipped_bit_in_any_file_of_a_store_is_never_served(built: World, tmp_path: Path, seed: int) -> None:
    root = tmp_path / "store"
    shutil.copytree(built.store.root, root)
    tried = files(root)
    kinds = {Path(name).suffix for name in tried}
    assert {".full", ".index", ".pack", ".json"} <= kinds, kinds
    refused = 0
    for number, name in enumerate(tried):
        whole = flip(root / name, seed)
        node = tmp_path / f"node-{number}"
        shutil.copytree(built.folder / "node", node, symlinks=True)
        installer = Checking()
        with built.agent(installer, str(node), source=StoreSource(Store(root))) as agent:
            agent.restore()
            for _ in range(2):
                agent.run_once()
        assert installer.serving.get(MODEL) in ("1", "3"), name
        refused += installer.serving[MODEL] == "1"
        (root / name).write_bytes(whole)
        shutil.rmtree(node)
    assert 0 < refused < len(tried)  # what is signed is refused, of slabs and packs there is another form


@pytest.mark.parametrize("node", ["node", "there"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_flipped_bit_in_any_file_of_a_node_is_refused_or_healed(
    built: World, tmp_path: Path, node: str, seed: int
) -> None:
    tried = files(built.folder / node)
    assert {"journal.db"} <= set(tried)
    assert any(name.startswith("tuf/") for name in tried)
    assert any(name.startswith("models/") for name in tried)
    for number, name in enumerate(tried):
        copy = tmp_path / f"node-{number}"
        shutil.copytree(built.folder / node, copy, symlinks=True)
        flip(copy / name, seed)
        installer = until_served(built, str(copy), "3")
        assert installer.serving == {MODEL: "3"}, name  # healed, and nobody had to do anything
        shutil.rmtree(copy)
