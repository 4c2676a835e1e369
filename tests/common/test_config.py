"""Configuration files: the nearest right key, and nothing but the one error whatever the file holds."""

from __future__ import annotations

import contextlib
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cloud.config import GatewayConfig, WorkerConfig
from common.config import from_json, load_toml, parse
from common.errors import ConfigError
from edge.config import NodeConfig
from hardware.build.spec import ModelSpec
from sync.service import ServiceConfig

KINDS = (NodeConfig, WorkerConfig, GatewayConfig, ServiceConfig, ModelSpec)
fixed = settings(
    derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

scalars = st.booleans() | st.integers(-(2**64), 2**64) | st.floats() | st.text(max_size=8) | st.dates()
keys = st.text(max_size=6) | st.sampled_from(
    [
        "name",
        "server",
        "engine",
        "models",
        "sync",
        "cache",
        "workers",
        "source",
        "http_port",
        "threads",
        "bundle",
        "inputs",
        "shape",
    ]
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


@fixed
@given(st.sampled_from(KINDS), st.dictionaries(keys, values, max_size=6))
@example(NodeConfig, {"drain_s": math.nan})
@example(NodeConfig, {"engine": {"threads": 2**63}})
@example(NodeConfig, {"engine": {"max_batch": {"": -1}}})
@example(NodeConfig, {"server": {"http_port": 2**70}})
@example(NodeConfig, {"models": [[{}]]})
@example(NodeConfig, {"sync": {"source": "a", "root": "b", "interval_s": math.nan}})
@example(ServiceConfig, {"store": "s", "broker": "x:²"})
@example(GatewayConfig, {"workers": ["a", "a"]})
def test_any_data_is_a_configuration_or_the_one_error(kind: Any, data: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse(data, kind, "test"), kind)


@fixed
@given(
    st.sampled_from(KINDS), st.binary(max_size=60) | st.text(alphabet='ab[]{}=".,#\n\\u0 ', max_size=60).map(str.encode)
)
@example(NodeConfig, b"a = " + b"[" * 5000)
@example(NodeConfig, b"a." * 3000 + b"a = 1")
@example(NodeConfig, b'name = "a\\u0000"')
@example(NodeConfig, b"a = 99999999999999999999999999999999999999999")
@example(NodeConfig, b"a = 2000-13-45")
@example(NodeConfig, b"a = " + b"9" * 5000)
def test_any_file_is_a_configuration_or_the_one_error(tmp_path: Path, kind: Any, data: bytes) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        load_toml(path, kind)


@fixed
@given(st.binary(max_size=60))
@example(b"[" * 100_000)
def test_any_json_is_a_value_or_the_one_error(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        from_json(data, ServiceConfig, "test")


@pytest.mark.parametrize(
    ("kind", "text", "path", "near"),
    [
        (NodeConfig, "gatway = 'x'", "gatway", "gateway"),
        (NodeConfig, "[server]\nhttpport = 1", "server.httpport", "http_port"),
        (NodeConfig, "[[models]]\nbundel = 'x'", "models[0].bundel", "bundle"),
        (NodeConfig, "[sync]\nsorce = 'x'", "sync.sorce", "source"),
        (NodeConfig, "[cache]\nquota = 1", "cache.quota", "quota_bytes"),
        (WorkerConfig, "[engine]\nthread = 1", "engine.thread", "threads"),
        (GatewayConfig, "worker = ['x']", "worker", "workers"),
        (ServiceConfig, "stor = 'x'", "stor", "store"),
        (ModelSpec, "[[inputs]]\ndata_type = 'FP32'", "inputs[0].data_type", "datatype"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_right_one(kind: Any, text: str, path: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tomllib.loads(text), kind, "x.toml")
    assert caught.value.path == path
    assert f"did you mean {near!r}?" in str(caught.value)


def test_key_that_is_like_no_other_is_refused_with_all_of_them() -> None:
    with pytest.raises(ConfigError, match=r"x\.toml: zzz: unknown key; accepted: .*state_dir.*"):
        parse({"zzz": 1}, NodeConfig, "x.toml")
