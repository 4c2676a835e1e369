"""The attacks by their names (the Uptane list): an agent on a real service, and somebody in between.

Each is refused by name, what serves goes on serving, and once the attack is over the node follows as if nothing had
been. Eavesdropping is mTLS's matter (`tests/sync/pki`). A wiped tuf folder and an old desired state, against the
journal: `tests/sync/agent/test_agent.py`.
"""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tuf.api.metadata import Metadata, TargetFile

from common.errors import FetchError
from sync.agent import Agent
from sync.agent.client import GrpcSource
from sync.events import SyncFailed
from sync.proto import sync_pb2, sync_pb2_grpc
from sync.release import desired_path, manifest_path, to_bytes
from sync.service import ServiceConfig
from sync.store import TIMESTAMP, Store
from sync.trust.repository import Repository
from sync.trust.rotation import Rotation
from tests.sync.fakes import FakeInstaller, World, running, trained, weights

Lie = Callable[[str, bytes], bytes]


class Between:
    """Sits on the way to a real service and changes what is read; what is signed can also be kept back."""

    def __init__(self, source: GrpcSource) -> None:
        self._source = source
        self.lie: Lie = lambda name, data: data
        self.hides: tuple[str, ...] = ()

    def read(self, name: str) -> Iterator[bytes]:
        data = b"".join(self._source.read(name))
        if any(part in name for part in self.hides):
            raise FetchError(name, "NOT_FOUND: no such file", is_permanent=True)
        yield self.lie(name, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class Scene:
    """A node on a real service, and somebody in between. It serves `version` and does not know that the next is out."""

    def __init__(self, folder: Path) -> None:
        self.world, self.installer = World(folder), FakeInstaller()
        self.weights, self.version = weights(), 1
        self.world.publish(self.weights)

    def begin(self, address: str) -> None:
        self.between = Between(GrpcSource(address, timeout_s=10.0))
        self.agent: Agent = self.world.agent(self.installer, source=self.between)
        assert self.agent.run_once()

    def next(self) -> None:
        self.old = Store(self.world.folder / f"old-{self.version}")  # as it was until now
        shutil.copytree(self.world.store.root / "metadata", self.old.root / "metadata")
        self.weights = trained(self.weights, "fc.bias", seed=self.version)
        self.world.publish(self.weights)
        self.world.events.clear()

    def told(self) -> str:
        errors = [self.agent.last_error, *(event.error for event in self.world.events_of(SyncFailed))]
        return " ".join(filter(None, errors))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    one = Scene(tmp_path_factory.mktemp("attacks"))
    with running(ServiceConfig(store=str(one.world.store.root))) as address:
        one.begin(address)
        yield one
        one.agent.close()


@pytest.fixture
def scene(stage: Scene) -> Scene:
    stage.next()
    return stage


def freeze(scene: Scene) -> None:
    """Always the same, sound answer: until it ends."""
    scene.between.lie = lambda name, data: scene.old.read(name) or data
    scene.world.clock.advance(days=4)


def hide_the_roles(scene: Scene) -> None:
    scene.between.hides = (".desired.json",)


def hide_the_manifest(scene: Scene) -> None:
    scene.between.hides = ("targets/releases/",)


def roll_back(scene: Scene) -> None:
    """The signed state of before, to a node that has seen a newer one."""
    scene.agent._verifier.refresh()
    scene.between.lie = lambda name, data: scene.old.read(TIMESTAMP) or b"" if name == TIMESTAMP else data


def send_without_end(scene: Scene) -> None:
    scene.between.lie = lambda name, data: data + bytes(1 << 20) if name == TIMESTAMP else data


def send_a_manifest_without_end(scene: Scene) -> None:
    scene.between.lie = lambda name, data: data + bytes(1 << 20) if "targets/releases/" in name else data


def mix_snapshots(scene: Scene) -> None:
    """An older snapshot under the newest timestamp."""
    at = Metadata.from_bytes(scene.old.read(TIMESTAMP) or b"").signed.snapshot_meta.version
    older = scene.old.read(f"metadata/{at}.snapshot.json") or b""
    scene.between.lie = lambda name, data: older if name.endswith(".snapshot.json") else data


def mix_manifests(scene: Scene) -> None:
    (path,) = scene.world.store.root.glob(f"targets/releases/digits/*.{scene.version}.json")
    older = path.read_bytes()
    scene.between.lie = lambda name, data: older[: len(data)].ljust(len(data)) if "targets/releases/" in name else data


def sign_as_a_stranger(scene: Scene) -> None:
    stranger = World(scene.world.folder / "stranger")
    scene.between.lie = lambda name, data: stranger.store.read(name) or data


def nest_deeply(scene: Scene) -> None:
    """Little to send and much to parse."""
    scene.between.lie = lambda name, data: b"[" * 16_000 if name == TIMESTAMP else data


ATTACKS = [
    ("freeze attack", freeze),
    ("partial bundle attack", hide_the_roles),
    ("partial bundle attack", hide_the_manifest),
    ("rollback attack refused", roll_back),
    ("endless data attack refused", send_without_end),
    ("endless data attack refused", send_a_manifest_without_end),
    ("mix-and-match attack refused", mix_snapshots),
    ("mix-and-match attack refused", mix_manifests),
    ("arbitrary software attack refused", sign_as_a_stranger),
    ("denial of service attack refused", nest_deeply),
]


@pytest.mark.parametrize(("name", "attack"), ATTACKS, ids=[f"{name}: {attack.__name__}" for name, attack in ATTACKS])
def test_attack_is_refused_by_name_and_leaves_nothing_behind(
    scene: Scene, name: str, attack: Callable[[Scene], None]
) -> None:
    attack(scene)
    assert not scene.agent.run_once()
    assert name in scene.told()
    assert scene.installer.serving == {"digits": str(scene.version)}
    scene.between.lie, scene.between.hides = lambda name, data: data, ()
    Repository(scene.world.store, scene.world.keys, clock=scene.world.clock).renew()
    assert scene.agent.run_once()
    scene.version += 1
    assert scene.installer.serving == {"digits": str(scene.version)}


def test_attack_drop_requests_is_told_from_an_answer(world: World, installer: FakeInstaller) -> None:
    """Somebody takes the connection and says nothing."""
    world.publish(weights())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = GrpcSource(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3)
        agent = world.agent(installer, source=source)
        assert not agent.run_once()
        assert "drop requests attack" in (agent.last_error or "")
        agent.close()


class Trickle(sync_pb2_grpc.SyncServicer):
    """Says the right thing, a byte at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def Metadata(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802  # the method's name in the proto
        data = self._store.read(request.name)
        if data is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such file")
        for byte in data or b"":
            if not context.is_active():
                return
            yield sync_pb2.MetadataChunk(data=bytes([byte]))
            time.sleep(0.02)


def test_attack_slow_retrieval_is_given_up(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    server = grpc.server(ThreadPoolExecutor(2))
    sync_pb2_grpc.add_SyncServicer_to_server(Trickle(world.store), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        source = GrpcSource(f"127.0.0.1:{port}", timeout_s=30.0, floor_bytes_s=10_000.0, floor_window_s=0.3)
        agent = world.agent(installer, source=source)
        assert not agent.run_once()
        assert "slow retrieval" in (agent.last_error or "")
        assert installer.serving == {}
        agent.close()
    finally:
        server.stop(0).wait()


# --- with stolen keys, or a disk that was set back ---


def test_the_online_key_cannot_sign_a_release(world: World, installer: FakeInstaller) -> None:
    """A hostile controller holds the `desired` key: it can point at signed releases only, whatever it lists itself."""
    world.publish(weights())
    agent = world.agent(installer)
    assert agent.run_once()
    desired = world.publisher.current("digits")
    assert desired is not None
    path = manifest_path("digits", "2")
    hostile = to_bytes(desired).replace(b'"epoch":1', b'"epoch":2').replace(b'"1"', b'"2"').replace(b"/1.", b"/2.")
    lists(world, "desired", {path: b"{}", desired_path("digits"): hostile})
    assert not agent.run_once()
    assert "arbitrary software attack refused" in world.events_of(SyncFailed)[-1].error
    assert installer.serving == {"digits": "1"}
    agent.close()


def lists(world: World, role: str, contents: dict[str, bytes]) -> None:
    """Has a role list targets that are none of its business."""
    repository = Repository(world.store, world.keys, clock=world.clock)
    signed = repository.targets(role)
    for path, data in contents.items():
        target = TargetFile.from_data(path, data, ["sha256"])
        signed.targets[path] = target
        folder, _, name = path.rpartition("/")
        world.store.replace(f"targets/{folder}/{target.hashes['sha256']}.{name}", data)
    repository.move_in({role: signed})


def test_a_release_that_was_withdrawn_cannot_be_assigned(world: World, installer: FakeInstaller) -> None:
    """It was signed once, and whoever holds the online key kept a copy."""
    first = weights()
    world.publish(first)
    old = world.publisher.current("digits")
    world.publish(trained(first, "fc.bias"))
    agent = world.agent(installer)
    assert agent.run_once()
    assert old is not None
    repository = Repository(world.store, world.keys, clock=world.clock)
    kept = {manifest_path("digits", "2"): repository.target(manifest_path("digits", "2")) or b""}
    again = to_bytes(old).replace(b'"epoch":1', b'"epoch":3')
    repository.add(kept, {desired_path("digits"): again}, dropped=[old.manifest])
    assert not agent.run_once()
    assert "arbitrary software attack refused" in world.events_of(SyncFailed)[-1].error
    assert installer.serving == {"digits": "2"}
    agent.close()


@pytest.mark.parametrize("wiped", [True, False], ids=["wiped", "set back"])
def test_a_stolen_key_does_not_come_back_with_an_older_tuf_folder(
    world: World, installer: FakeInstaller, wiped: bool
) -> None:
    """The thief hides the root that withdrew the key, and the node's disk forgot it: the journal knows."""
    world.publish(weights())
    agent = world.agent(installer)
    assert agent.run_once()
    tuf, older = world.folder / "node/tuf", world.folder / "older-tuf"
    shutil.copytree(tuf, older, symlinks=True)
    forged = Metadata.from_bytes(world.store.read(TIMESTAMP) or b"")
    forged.signed.version += 5
    forged.sign(world.keys.signer("timestamp"))
    repository = Repository(world.store, world.keys, clock=world.clock)
    Rotation(world.store, world.keys, repository).revoke(world.keys.signer("timestamp").public_key.keyid)
    assert agent.run_once()
    shutil.rmtree(tuf)
    if not wiped:
        shutil.copytree(older, tuf, symlinks=True)
    (world.store.root / "metadata/2.root.json").rename(world.folder / "hidden")
    world.store.replace(TIMESTAMP, forged.to_bytes())
    assert not agent.run_once()
    assert "rollback attack refused: root metadata has version 1, version 2 was seen before" in (agent.last_error or "")
    agent.close()
