"""What the one-machine system consists of: its processes in start order, their ports, their configuration files.

Pure: options in, descriptions out. Nothing here starts anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.up.demo import DIGITS, PHOTOS, DemoModel

# What the tour's tests take away, one at a time, to see the tour fail.
CAUSES = ("edge", "cache", "fallback", "push", "reuse", "gate", "corruption")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Options of one start. `ports` by process and protocol, for example ``edge-a.http``."""

    state: Path
    ports: Mapping[str, int]
    models: tuple[DemoModel, ...]
    interval_s: float = 900.0
    without: frozenset[str] = field(default_factory=frozenset)

    @property
    def store(self) -> Path:
        return self.state / "store"

    @property
    def keys(self) -> Path:
        return self.state / "keys"

    @property
    def root(self) -> Path:
        return self.state / "root.json"


KINDS = ("broker", "sync", "worker", "gateway", "edge")  # each leans on those before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One child: its `outrider` subcommand, and the configuration file that it reads, if any."""

    name: str
    kind: str  # one of KINDS
    command: tuple[str, ...]
    config: str = ""
    models: tuple[str, ...] = ()  # what it has to serve before the system is ready


_MAX_SOCKET_PATH = 107  # sun_path of Linux, less the final zero

PORTS = (
    "gateway.http",
    "gateway.grpc",
    "edge-a.http",
    "edge-a.grpc",
    "edge-b.http",
    "edge-b.grpc",
    "worker-1.http",
    "worker-1.grpc",
    "worker-2.http",
    "worker-2.grpc",
    "sync.grpc",
    "broker.mqtt",
)


def processes(layout: Layout) -> tuple[Process, ...]:
    """In start order: what others lean on comes first."""
    names = tuple(model.name for model in layout.models)
    on_a = names if "edge" not in layout.without else tuple(name for name in names if name != PHOTOS.name)
    return (
        _broker(layout),
        _sync(layout),
        *(_worker(layout, name) for name in ("worker-1", "worker-2")),
        _gateway(layout),
        _edge(layout, "edge-a", models=on_a),
        _edge(layout, "edge-b", models=(DIGITS.name,), max_batch={DIGITS.name: 4}),
    )


def _broker(layout: Layout) -> Process:
    port = str(layout.ports["broker.mqtt"])
    return Process(name="broker", kind="broker", command=("sync", "broker", "--port", port))


def _sync(layout: Layout) -> Process:
    config = {
        "store": str(layout.store),
        "keys": str(layout.keys),
        "port": layout.ports["sync.grpc"],
        "state": str(layout.state / "sync"),
        "broker": f"127.0.0.1:{layout.ports['broker.mqtt']}",
    }
    return Process(name="sync", kind="sync", command=("sync", "serve"), config=toml(config))


def _gateway(layout: Layout) -> Process:
    config = {
        "name": "gateway",
        "server": _ports(layout, "gateway"),
        "workers": [f"127.0.0.1:{layout.ports[f'{name}.grpc']}" for name in ("worker-1", "worker-2")],
    }
    models = tuple(model.name for model in layout.models)  # what its workers serve
    return Process(name="gateway", kind="gateway", command=("cloud", "gateway"), config=toml(config), models=models)


def _worker(layout: Layout, name: str) -> Process:
    config = {
        "name": name,
        "state_dir": str(layout.state / name),
        "server": _ports(layout, name),
        "engine": {
            "variants": ["full"],
            "engines": ["torch", "onnxruntime"],
            "factories": {model.name: model.factory for model in layout.models},
        },
        "sync": _sync_table(layout, tuple(model.name for model in layout.models)),
    }
    models = tuple(model.name for model in layout.models)
    return Process(name=name, kind="worker", command=("cloud", "worker"), config=toml(config), models=models)


def _edge(layout: Layout, name: str, *, models: tuple[str, ...], max_batch: Mapping[str, int] | None = None) -> Process:
    config: dict[str, Any] = {
        "name": name,
        "state_dir": str(layout.state / name),
        "server": {**_ports(layout, name), **_sockets(layout.state / name)},
        "cache": {"enabled": "cache" not in layout.without},
        "engine": {"max_batch": dict(max_batch or {}), "golden_gate": "gate" not in layout.without},
        "sync": _sync_table(layout, models),
    }
    if "fallback" not in layout.without:
        config["gateway"] = f"127.0.0.1:{layout.ports['gateway.grpc']}"
    return Process(name=name, kind="edge", command=("edge", "run"), config=toml(config), models=models)


def _ports(layout: Layout, name: str) -> dict[str, int]:
    return {"http_port": layout.ports[f"{name}.http"], "grpc_port": layout.ports[f"{name}.grpc"]}


def _sockets(folder: Path) -> dict[str, str]:
    """Unix sockets in the node's folder, where the kernel's limit on their path allows it."""
    paths = {"http_uds": str(folder / "http.sock"), "grpc_uds": str(folder / "grpc.sock")}
    return paths if all(len(path.encode()) <= _MAX_SOCKET_PATH for path in paths.values()) else {}


def _sync_table(layout: Layout, models: tuple[str, ...]) -> dict[str, Any]:
    table: dict[str, Any] = {
        "source": f"127.0.0.1:{layout.ports['sync.grpc']}",
        "root": str(layout.root),
        "models": list(models),
        "probation_s": min(60.0, layout.interval_s / 10),
    }
    if "push" in layout.without:  # nobody tells the node of news, and it does not ask in time
        return table | {"interval_s": 3600.0}
    return table | {"interval_s": layout.interval_s, "broker": f"127.0.0.1:{layout.ports['broker.mqtt']}"}


def toml(table: Mapping[str, Any], path: str = "") -> str:
    """TOML of nested tables of strings, numbers, booleans and lists of these (JSON's forms of all four are TOML's)."""
    lines = [f"{_key(key)} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    text = "".join(f"{line}\n" for line in lines)
    for key, value in table.items():
        if isinstance(value, Mapping):
            name = f"{path}.{_key(key)}" if path else _key(key)
            text += f"\n[{name}]\n{toml(value, name)}"
    return text


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() else json.dumps(name)
