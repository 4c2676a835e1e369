from __future__ import annotations

import time
from pathlib import Path

import pytest

from common.errors import ConfigError, FetchError
from sync import codec
from sync.agent.client import GrpcSource
from sync.agent.ports import Want
from sync.service import ServiceConfig
from sync.slabs import slab_id
from tests.sync.fakes import World, running, trained, weights

UNKNOWN = "ee" * 32


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


def test_an_unknown_name_or_slab_is_a_permanent_error(world: World, config: ServiceConfig) -> None:
    with running(config) as address:
        source = GrpcSource(address, timeout_s=10)
        for call in (source.read("metadata/9.root.json"), source.read("../keys/root.pem")):
            with pytest.raises(FetchError) as caught:
                list(call)
            assert caught.value.is_permanent
        with pytest.raises(FetchError, match="NOT_FOUND"):
            list(source.fetch([Want(id=UNKNOWN, length=4)]))
        for wants in ([Want(id="ab", length=4)], [Want(id=UNKNOWN, length=4, bases=("ab" * 4000,))]):
            with pytest.raises(FetchError, match="INVALID_ARGUMENT"):
                list(source.fetch(wants))
        source.close()


def test_a_holder_of_the_base_gets_the_delta_and_others_the_full(world: World, config: ServiceConfig) -> None:
    old, new = weights(), trained(weights(), "fc.weight")
    world.publish(old)
    world.publish(new)
    raw, base = new["fc.weight"].tobytes(), old["fc.weight"].tobytes()
    wants = [
        Want(id=slab_id(raw), length=len(raw), bases=(UNKNOWN, slab_id(base))),
        Want(id=slab_id(raw), length=len(raw), bases=(UNKNOWN,)),
        Want(id=slab_id(raw), length=len(raw)),
    ]
    with running(config) as address:
        source = GrpcSource(address, timeout_s=10)
        objects = [data for _, data in source.fetch(wants)]
        source.close()
    assert [codec.read_header(data, "x").form_name for data in objects] == ["planes", "full", "full"]
    assert codec.decode(objects[0], slab=slab_id(raw), length=len(raw), base=base) == raw


def test_nobody_there_is_a_transient_error() -> None:
    source = GrpcSource("127.0.0.1:9", timeout_s=5)
    with pytest.raises(FetchError) as caught:
        list(source.read("metadata/timestamp.json"))
    assert not caught.value.is_permanent
    source.close()


def test_a_service_with_the_keys_signs_again_at_start(world: World, config: ServiceConfig) -> None:
    world.clock.advance(days=-2)
    world.publish(weights())
    before = world.store.read("metadata/timestamp.json")
    with_keys = ServiceConfig(store=config.store, keys=str(world.folder / "keys"))
    with running(with_keys):
        for _ in range(100):
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
