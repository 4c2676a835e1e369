"""A store in an S3 bucket: published into, read by nodes, written by one at a time. The server is moto."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.cli import main
from common.errors import BucketError, ConfigError, FetchError, LeaseLost, StoreBusy
from sync.agent import Agent, AgentConfig
from sync.agent.client import GrpcSource
from sync.agent.ports import Part, Range
from sync.agent.probation import ProbationLimits
from sync.agent.s3_source import S3Source
from sync.events import SlabsFetched
from sync.publisher import Published, Publisher
from sync.service import ServiceConfig
from sync.store import TIMESTAMP, Store, index_name, object_name, pack_name
from sync.store.bucket import Bucket
from sync.store.lease import LEASE_S, TAKEOVER_S, held, renew
from sync.store.object_store import ObjectStore
from sync.store.stores import open_store
from sync.trust.keys import Keys
from sync.trust.repository import Repository
from tests.sync.buckets import new_bucket, s3_server
from tests.sync.fakes import FakeInstaller, Killed, make_bundle, running, trained, weights
from tests.sync.web import answer, scripted

ID, OTHER = "dd" * 32, "ee" * 32


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def address(server: str) -> str:
    return new_bucket(server)


class Fleet:
    """A store at `address` with keys, a publisher and a node."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address, self.store = folder, address, ObjectStore(address)
        self.keys = Keys.create(folder / "keys")
        self.root = folder / "root.json"
        with self.store.lock():
            self.root.write_bytes(Repository(self.store, self.keys).create())
        self.events: list[Any] = []
        self.installer = FakeInstaller(variants=("full",))

    def publish(self, tensors: dict[str, Any], store: ObjectStore | None = None, **options: Any) -> Published:
        bundle = make_bundle(self.folder / "bundle", "digits", tensors)
        return Publisher(store or self.store, self.keys).publish(bundle, **options)

    def agent(self, source: str, name: str = "node") -> Agent:
        config = AgentConfig(
            folder=self.folder / name, root=self.root, source=source, probation=ProbationLimits(seconds=0)
        )
        return Agent(config, self.installer, on_event=self.events.append)

    def fetched(self) -> list[set[str]]:
        return [set(event.bytes_by_form) for event in self.events if isinstance(event, SlabsFetched)]


@pytest.fixture
def fleet(tmp_path: Path, address: str) -> Fleet:
    return Fleet(tmp_path, address)


# --- releases ---


def test_a_release_and_then_a_delta_arrive_straight_from_the_bucket(fleet: Fleet) -> None:
    first = fleet.publish(weights())
    with fleet.agent(fleet.address) as agent:
        assert agent.run_once(), agent.last_error
        second = fleet.publish(trained(weights()))
        assert agent.run_once(), agent.last_error
    assert (first.version, second.version) == ("1", "2")
    assert second.bytes_delta < first.bytes_full
    assert fleet.installer.serving == {"digits": "2"}
    whole, delta = fleet.fetched()
    assert whole == {"full"}
    assert "full" not in delta
    published = (fleet.folder / "bundle/full/model.safetensors").read_bytes()
    assert (fleet.folder / "node/models/digits/2/full/model.safetensors").read_bytes() == published


def test_a_service_hands_out_what_is_in_the_bucket(fleet: Fleet) -> None:
    fleet.publish(weights())
    with running(ServiceConfig(store=fleet.address)) as grpc, fleet.agent(grpc) as agent:
        assert agent.run_once(), agent.last_error
        fleet.publish(trained(weights()))
        assert agent.run_once(), agent.last_error
    assert fleet.installer.serving == {"digits": "2"}
    assert "full" not in fleet.fetched()[1]


def test_the_same_content_is_published_once_and_damage_is_mended_by_force(fleet: Fleet) -> None:
    fleet.publish(small())
    assert fleet.publish(trained(small())).is_new
    assert not fleet.publish(trained(small())).is_new
    objects = [one.name for one in fleet.store.files("objects")]
    packs = [one.name for one in fleet.store.files("packs") if one.name.endswith(".pack")]
    bucket = Bucket(fleet.address, timeout_s=5)
    for name in (objects[0], packs[0]):
        bucket.put(name, b"damaged")
    assert fleet.publish(trained(small()), force=True).is_new
    assert b"damaged" not in {bucket.get(name).data for name in (objects[0], packs[0])}  # type: ignore[union-attr]


def test_a_publisher_that_dies_anywhere_leaves_the_old_state_and_the_next_one_goes_on(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sync.store.lease.SKEW_S", -1000.0)  # a dead writer's lock is free at once
    fleet.publish(small())
    before = fleet.store.read(TIMESTAMP)
    for name in ("objects/", ".pack", TIMESTAMP):
        with pytest.raises(Killed):
            fleet.publish(trained(small()), Dying(fleet.address, at=name))
        assert fleet.store.read(TIMESTAMP) == before
    with fleet.agent(fleet.address) as agent:
        assert agent.run_once(), agent.last_error
        assert fleet.installer.serving == {"digits": "1"}
        assert fleet.publish(trained(small())).version == "2"
        assert agent.run_once(), agent.last_error
    assert fleet.installer.serving == {"digits": "2"}


def small() -> dict[str, Any]:
    return weights(rows=16)


class Dying(ObjectStore):
    """The process ends before it writes to a name with `at` in it."""

    def __init__(self, address: str, *, at: str) -> None:
        super().__init__(address)
        for method in ("put", "create", "swap"):
            setattr(self._bucket, method, self._until(at, getattr(self._bucket, method)))

    def _until(self, at: str, write: Callable[..., Any]) -> Callable[..., Any]:
        def put(name: str, *args: Any, **options: Any) -> Any:
            if at in name:
                raise Killed
            return write(name, *args, **options)

        return put


def test_the_commands_take_the_address_of_a_bucket_and_make_what_they_make_in_a_folder(
    address: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where = ["--store", address, "--keys", str(tmp_path / "keys")]
    assert main(["sync", "keys", "init", *where, "--root", str(tmp_path / "root.json")]) == 0
    assert main(["sync", "keys", "init", *where, "--if-absent"]) == 0
    folder = Store(tmp_path / "store")
    Repository(folder, Keys(tmp_path / "keys")).create()
    for tensors in (small(), trained(small(), "fc.bias")):
        bundle = make_bundle(tmp_path / "bundle", "digits", tensors)
        assert main(["publish", "--bundle", str(bundle), *where]) == 0
        Publisher(folder, Keys(tmp_path / "keys")).publish(bundle)
    names = {one.name: one.size for one in folder.files("objects", "packs")}
    assert len(names) > 10
    assert {one.name: one.size for one in ObjectStore(address).files("objects", "packs")} == names
    assert main(["sync", "keys", "status", "--store", address]) == 0
    assert main(["sync", "verify", "--store", address]) == 0
    assert main(["sync", "gc", "--store", address]) == 0
    assert main(["sync", "serve", "--store", address, "--check"]) == 0
    assert main(["sync", "export", "--store", address, "--out", str(tmp_path / "carried.zip")]) == 0
    said = capfd.readouterr()
    assert "digits/2 released" in said.err
    assert "no-secret-at-all" not in said.err + said.out
    island = ["--store", str(tmp_path / "island")]
    assert main(["sync", "import", str(tmp_path / "carried.zip"), *island]) == 1
    assert main(["sync", "import", str(tmp_path / "carried.zip"), *island, "--root", str(tmp_path / "root.json")]) == 0
    assert "until" in capfd.readouterr().err
    assert main(["sync", "verify", *island]) == 0


# --- one writer ---


def test_a_second_publisher_is_refused_and_told_who_writes(fleet: Fleet) -> None:
    other = ObjectStore(fleet.address)
    with other.lock():
        with pytest.raises(StoreBusy, match=r"s3://.*/lock \(held by .*process \d+"):
            fleet.publish(small(), wait_s=0.0)
        waiting = threading.Event()
        done: list[Published] = []
        thread = threading.Thread(target=lambda: (waiting.set(), done.append(fleet.publish(small(), wait_s=30))))
        thread.start()
        waiting.wait(10)
    thread.join(30)
    assert [one.version for one in done] == ["1"]


def test_a_dead_writers_lock_is_taken_over_only_after_it_has_been_watched_long_enough(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sync.store.lease._LOOK_S", 0.01)
    bucket, clock = Bucket(address, timeout_s=5), Ticking(step=TAKEOVER_S / 4)
    dead = contextlib.ExitStack()
    dead.enter_context(held(bucket, 0.0)).is_lost = True
    started = clock.seconds
    with held(bucket, TAKEOVER_S * 3, now=clock):
        assert clock.seconds - started >= TAKEOVER_S
        with pytest.raises(StoreBusy), held(bucket, 0.0):
            pass
    dead.close()


class Ticking:
    """Goes on by `step` seconds whenever it is looked at."""

    def __init__(self, step: float) -> None:
        self.seconds, self._step = 1000.0, step

    def __call__(self) -> float:
        self.seconds += self._step
        return self.seconds


def test_a_lease_that_was_not_renewed_in_time_writes_no_more(address: str) -> None:
    bucket = Bucket(address, timeout_s=5)
    with held(bucket, 0.0) as lease:
        lease.check(lease.ends_at - 0.1)
        with pytest.raises(LeaseLost):
            lease.check(lease.ends_at)
        renew(bucket, lease, 500.0)
        lease.check(500.0 + LEASE_S - 0.1)
        bucket.put("lock", b'{"owner": "somebody else", "until": 99999999999}')
        renew(bucket, lease, 501.0)
        with pytest.raises(LeaseLost, match="publish again"):
            lease.check(501.0)
    assert b"somebody else" in bucket.get("lock").data  # type: ignore[union-attr]


def test_of_two_writers_that_believe_in_their_lock_the_second_signs_nothing(fleet: Fleet) -> None:
    slow = ObjectStore(fleet.address)
    with slow.lock():
        Bucket(fleet.address, timeout_s=5).put("lock", b'{"owner": "", "until": 0}')  # as if it had run out
        fleet.publish(small())
        signed = fleet.store.read(TIMESTAMP)
        with pytest.raises(LeaseLost, match="another writer has signed"):
            slow.replace(TIMESTAMP, b"of the slow one")
    assert fleet.store.read(TIMESTAMP) == signed


# --- reading ---


def test_ranges_come_in_their_order_and_what_is_not_there_is_told_for_each(address: str) -> None:
    store, data = ObjectStore(address), bytes(range(256)) * 3000
    store.put_full(ID, data)
    assert not store.put_full(ID, b"other")
    with store.new_pack(ID, OTHER) as file:
        file.write(b"0123456789")
    name, pack = object_name(ID), pack_name(ID, OTHER)
    ranges = {
        Range(name=name, limit=len(data)): data,
        Range(name=object_name(OTHER), limit=10): None,
        Range(name=pack, offset=2, length=3): b"234",
        Range(name=pack, offset=5, length=1): b"5",
        Range(name=pack, offset=8, length=3): None,
        Range(name=pack, offset=100, length=3): None,
        Range(name=pack, offset=(1 << 64) - 1, length=3): None,
        Range(name=name, offset=5, length=len(data) - 5): data[5:],
        Range(name=name, offset=767_990, limit=len(data)): data[767_990:],
        Range(name=name, offset=len(data), limit=len(data)): b"",
        Range(name=pack, offset=9, length=1): b"9",
    }
    source = S3Source(address, timeout_s=5)
    assert list(source.fetch(list(ranges))) == list(ranges.values())
    with pytest.raises(FetchError, match="endless data") as caught:
        list(source.fetch([Range(name=name, limit=100)]))
    assert caught.value.is_permanent
    parts: list[Part] = list(source.stream([Range(name=name, limit=len(data))]))
    assert len(parts) > 1
    assert b"".join(part.data for part in parts) == data
    assert store.part(pack, 8, 5) == (10, b"89")
    assert store.part(pack, 50, 5) == (10, b"")
    assert store.part(pack_name(OTHER, ID), 0, 5) is None
    assert store.part("lock", 0, 5) is None
    assert store.part("objects/../lock", 0, 5) is None
    source.close()
    with pytest.raises(FetchError, match="closed"):
        list(source.fetch([Range(name=name, limit=len(data))]))


def test_a_signed_file_that_is_not_there_is_a_permanent_error_and_a_server_that_is_not_there_a_transient_one(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FetchError, match=r"9\.root\.json") as caught:
        list(S3Source(address, timeout_s=5).read("metadata/9.root.json"))
    assert caught.value.is_permanent
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(FetchError) as caught:
        list(S3Source(address, timeout_s=5).read("metadata/9.root.json"))
    assert not caught.value.is_permanent
    with pytest.raises(BucketError) as failed:
        ObjectStore(address).read(TIMESTAMP)
    assert "no-secret-at-all" not in f"{caught.value}{failed.value}"


def test_a_service_outlives_a_bucket_that_cannot_be_read(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(head: bytes, connection: socket.socket) -> None:
        answer("403 Forbidden", b"", "Connection: close")(head, connection)
        raise OSError

    monkeypatch.setattr("sync.store.object_store.ObjectStore.look_s", 0.01)
    with scripted(refusing) as site:
        monkeypatch.setenv("AWS_ENDPOINT_URL", site.url)
        with running(ServiceConfig(store=fleet.address)) as address:
            source = GrpcSource(address, timeout_s=10)
            for call in (source.read(TIMESTAMP), source.fetch([Range(name=object_name(ID), limit=9)])):
                with pytest.raises(FetchError, match=r"the store cannot be read: s3://") as caught:
                    list(call)
                assert not caught.value.is_permanent
            source.close()
    assert "a background loop" not in caplog.text
    assert "no-secret-at-all" not in caplog.text


def test_an_index_is_replaced_and_a_pack_dropped(address: str) -> None:
    store = ObjectStore(address)
    store.put_index(ID, OTHER, b"one")
    store.put_index(ID, OTHER, b"two")
    assert store.index(ID, OTHER) == b"two"
    with store.open_pack(ID, OTHER) as file:
        assert file is None
    store.drop_pack(ID, OTHER)
    assert store.index(ID, OTHER) is None
    assert [one.name for one in store.files()] == []
    assert store.where(index_name(ID, OTHER)).startswith("s3://")


def test_a_pack_of_several_parts_arrives_whole(address: str) -> None:
    data = bytes(range(251)) * (9 << 20 >> 8)  # more than one part of 8 MiB
    store = ObjectStore(address)
    with store.new_pack(ID, OTHER) as file:
        file.write(data)
    with store.open_pack(ID, OTHER) as found:
        assert found is not None
        assert found.read() == data


# --- addresses ---


@pytest.mark.parametrize(
    "address", ["s3://", "s3://x", "s3://Bucket/x", "s3://bucket/../x", "s3://key:secret@bucket/x"]
)
def test_an_address_of_no_bucket_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="BUCKET"):
        open_store(address)


def test_a_folder_needs_no_obstore_and_a_bucket_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert isinstance(open_store(tmp_path), Store)
    with pytest.raises(ConfigError, match=r"outrider\[s3\]"):
        open_store("s3://bucket/x")


def test_slabs_go_up_side_by_side_and_the_first_failure_ends_it(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    create, lock = Bucket.create, threading.Lock()
    under_way, most, made = 0, 0, 0

    def slow(bucket: Bucket, name: str, data: bytes) -> str | None:
        nonlocal under_way, most, made
        if not name.startswith("objects/"):
            return create(bucket, name, data)
        with lock:
            under_way, made = under_way + 1, made + 1
            most = max(most, under_way)
        time.sleep(0.02)
        with lock:
            under_way -= 1
        if made > limit:
            raise BucketError(name, "503 Slow Down")
        return create(bucket, name, data)

    monkeypatch.setattr(Bucket, "create", slow)
    tensors = {f"layer.{number}": np.full((512, 512), number, np.float32) for number in range(24)}  # a slab each
    limit = 5
    with pytest.raises(BucketError, match="503"):
        fleet.publish(tensors)
    assert made < 2 * 24  # of two files
    assert under_way == 0
    limit, made = 10_000, 0
    assert fleet.publish(tensors).version == "1"
    assert 1 < most <= ObjectStore.writers
    with fleet.agent(fleet.address) as agent:
        assert agent.run_once()
    assert fleet.installer.serving == {"digits": "1"}
