from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError, FetchError
from sync.agent.client import GrpcSource
from sync.agent.ports import Range
from sync.service import MAX_RANGES, ServiceConfig
from sync.store import Store, object_name, pack_name
from tests.sync.fakes import FakeClock, World, running, weights

ID, UNKNOWN = "dd" * 32, "ee" * 32


@pytest.fixture
def config(world: World) -> ServiceConfig:
    return ServiceConfig(store=str(world.store.root))


def test_signed_files_come_whole_however_large(world: World, config: ServiceConfig) -> None:
    big = bytes(range(256)) * 8192
    world.store.replace("targets/releases/a/big.json", big)
    with running(config) as address:
        source = GrpcSource(address, timeout_s=10)
        assert b"".join(source.read("targets/releases/a/big.json")) == big
        assert max(map(len, source.read("targets/releases/a/big.json"))) <= 256 << 10
        source.close()


def test_an_unknown_name_of_a_signed_file_is_a_permanent_error(world: World, config: ServiceConfig) -> None:
    with running(config) as address:
        source = GrpcSource(address, timeout_s=10)
        for call in (source.read("metadata/9.root.json"), source.read("../keys/root.pem")):
            with pytest.raises(FetchError) as caught:
                list(call)
            assert caught.value.is_permanent
        source.close()


def test_ranges_come_in_their_order_and_what_is_not_there_is_told_for_each(world: World, config: ServiceConfig) -> None:
    data = bytes(range(256)) * 3000  # several messages
    world.store.put_full(ID, data)
    with world.store.new_pack(ID, UNKNOWN) as file:
        file.write(b"0123456789")
    name, pack = object_name(ID), pack_name(ID, UNKNOWN)
    ranges = {
        Range(name=name, limit=len(data)): data,
        Range(name=object_name(UNKNOWN), limit=10): None,
        Range(name=pack, offset=2, length=3): b"234",
        Range(name=pack, offset=8, length=3): None,
        Range(name=pack, offset=100, length=3): None,
        Range(name=pack, offset=(1 << 64) - 1, length=3): None,
        Range(name=name, offset=5, length=len(data) - 5): data[5:],
        Range(name=pack, offset=9, length=1): b"9",
    }
    with running(config) as address:
        source = GrpcSource(address, timeout_s=10)
        assert list(source.fetch(list(ranges))) == list(ranges.values())
        source.close()


def test_neighbouring_ranges_travel_as_one(
    world: World, config: ServiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.random.default_rng(0).bytes(1_000_000)
    with world.store.new_pack(ID, UNKNOWN) as file:
        file.write(data)
    name, read = pack_name(ID, UNKNOWN), list[tuple[int, int]]()
    part = Store.part

    def recording(self: Store, name: str, offset: int, length: int) -> tuple[int, bytes] | None:
        read.append((offset, length))
        return part(self, name, offset, length)

    monkeypatch.setattr(Store, "part", recording)
    ranges = [Range(name=name, offset=at, length=1000) for at in range(0, 500_000, 1000)]
    ranges += [Range(name=name, offset=at, length=100_000) for at in range(700_000, 1_200_000, 100_000)]
    with running(config) as address:
        source = GrpcSource(address, timeout_s=10)
        answers = list(source.fetch(ranges))
        source.close()
    assert read == [(0, 500_000), (700_000, 500_000)]
    wanted = [data[one.offset : one.offset + one.length] for one in ranges]
    assert answers == [*wanted[:-2], None, None]  # the pack ends before the last two: the others are whole


@pytest.mark.parametrize(
    "name",
    [
        "../keys/root.pem",
        "objects/../../keys/root.pem",
        "packs/../metadata/timestamp.json",
        "metadata/timestamp.json",
        "lock",
        "objects",
        "/etc/passwd",
        "",
    ],
)
def test_no_range_leads_out_of_objects_and_packs(world: World, config: ServiceConfig, name: str) -> None:
    world.publish(weights())
    with running(config) as address:
        source = GrpcSource(address, timeout_s=10)
        assert list(source.fetch([Range(name=name, limit=1 << 20)])) == [None]
        source.close()


def test_one_call_is_bounded(world: World, config: ServiceConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    world.store.put_full(ID, bytes(1000))
    monkeypatch.setattr("sync.service.MAX_BYTES", 2500)
    one = Range(name=object_name(ID), limit=1000)
    with running(config) as address:
        source = GrpcSource(address, timeout_s=10)
        assert len(list(source.fetch([one] * 2))) == 2
        for ranges in ([one] * 3, [one] * (MAX_RANGES + 1)):
            with pytest.raises(FetchError, match="INVALID_ARGUMENT") as caught:
                list(source.fetch(ranges))
            assert caught.value.is_permanent
        source.close()


def test_nobody_there_is_a_transient_error() -> None:
    source = GrpcSource("127.0.0.1:9", timeout_s=5)
    with pytest.raises(FetchError) as caught:
        list(source.read("metadata/timestamp.json"))
    assert not caught.value.is_permanent
    source.close()


def test_a_service_with_the_keys_signs_again_at_start(tmp_path: Path) -> None:
    world = World(tmp_path, FakeClock(datetime.now(UTC) - timedelta(days=2)))
    world.publish(weights())
    before = world.store.read("metadata/timestamp.json")
    with_keys = ServiceConfig(store=str(world.store.root), keys=str(world.folder / "keys"))
    with running(with_keys):
        for _ in range(500):
            if world.store.read("metadata/timestamp.json") != before:
                break
            time.sleep(0.02)
    assert world.store.read("metadata/timestamp.json") != before


def test_a_taken_port_is_an_error_that_names_it(world: World, config: ServiceConfig) -> None:
    with running(config) as address:
        taken = ServiceConfig(store=config.store, port=int(address.rpartition(":")[2]))
        with pytest.raises(ConfigError, match="cannot be bound"), running(taken):
            pass


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="port"):
        ServiceConfig(store="s", port=70000)
    with pytest.raises(ValueError, match="spread_ms"):
        ServiceConfig(store="s", spread_ms=-1)
    with pytest.raises(ValueError, match="broker"):
        ServiceConfig(store="s", broker="localhost")
    assert Path(ServiceConfig(store="s").store) == Path("s")
