"""The configuration files of gateway and worker, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.transport.servers import ServerOptions
from hardware.install import EngineOptions
from hardware.serving import StaticModel
from sync.agent.running import SyncOptions

CLOUD = "cloud"  # the target in stamps, whether a gateway is in front or a worker is called itself


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    workers: tuple[str, ...]  # gRPC addresses of the pool's members: host:port or unix:/path
    name: str = "gateway"
    server: ServerOptions = field(default_factory=ServerOptions)
    probe_every_s: float = 1.0
    drain_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.workers or len(set(self.workers)) != len(self.workers):
            raise ValueError(f"workers must be one or more different addresses, got {list(self.workers)}")
        if not 0.05 <= self.probe_every_s <= 60:
            raise ValueError(f"probe_every_s must be 0.05..60, got {self.probe_every_s}")
        _check_drain(self.drain_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """`engine.factories` names the code of torch models (``model = "module:callable"``): a release never does."""

    name: str = "worker"
    state_dir: str = ""  # journal and installed models; needed for the parameter path
    server: ServerOptions = field(default_factory=ServerOptions)
    engine: EngineOptions = field(
        default_factory=lambda: EngineOptions(variants=("full",), engines=("torch", "onnxruntime"))
    )
    models: tuple[StaticModel, ...] = ()
    sync: SyncOptions | None = None
    max_queue_rows: int = 1024
    drain_s: float = 10.0

    def __post_init__(self) -> None:
        if self.max_queue_rows < 1:
            raise ValueError(f"max_queue_rows must be >= 1, got {self.max_queue_rows}")
        if self.sync is not None and not self.state_dir:
            raise ValueError("state_dir is needed for the parameter path")
        _check_drain(self.drain_s)


def _check_drain(drain_s: float) -> None:
    if not 0 <= drain_s <= 600:
        raise ValueError(f"drain_s must be 0..600, got {drain_s}")
