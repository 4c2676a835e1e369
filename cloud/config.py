"""The configuration files of gateway and worker, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.transport.servers import ServerOptions, check_exposure
from common.transport.tenants import TenantOptions
from hardware.install import EngineOptions
from hardware.serving import StaticModel
from sync.agent.running import SyncOptions

CLOUD = "cloud"  # the target in stamps, whether a gateway is in front or a worker is called itself


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    workers: tuple[str, ...]  # gRPC addresses of the pool's members: host:port or unix:/path
    name: str = "gateway"  # its name in the endpoint file; stamps carry the worker's
    server: ServerOptions = field(default_factory=ServerOptions)  # where it listens
    tenants: tuple[TenantOptions, ...] = ()  # who may call; none: one tenant, and only this machine may
    api_key_file: str | None = None  # file (mode 0600) with the key that the workers know this gateway by
    probe_every_s: float = 1.0  # 0.05..60: between two looks at each worker
    drain_s: float = 10.0  # 0..600: for calls in progress to end after SIGTERM

    def __post_init__(self) -> None:
        check_exposure(self.server, self.tenants)
        if not self.workers or len(set(self.workers)) != len(self.workers):
            raise ValueError(f"workers must be one or more different addresses, got {list(self.workers)}")
        if not 0.05 <= self.probe_every_s <= 60:
            raise ValueError(f"probe_every_s must be 0.05..60, got {self.probe_every_s}")
        _check_drain(self.drain_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """`engine.factories` names the code of torch models (``model = "module:callable"``): a release never does."""

    name: str = "worker"  # its name in stamps (x-outrider-by) and the endpoint file
    state_dir: str = ""  # journal and installed models; needed for the parameter path
    server: ServerOptions = field(default_factory=ServerOptions)  # where it listens
    tenants: tuple[TenantOptions, ...] = ()  # who may call; none: one tenant, and only this machine may
    # what it may run, and how
    engine: EngineOptions = field(
        default_factory=lambda: EngineOptions(variants=("full",), engines=("torch", "onnxruntime"))
    )
    models: tuple[StaticModel, ...] = ()  # bundles on this machine, served without the parameter path
    sync: SyncOptions | None = None  # the parameter path; none: nothing new arrives
    max_queue_rows: int = 1024  # 1..: most that wait for the device; more are refused
    drain_s: float = 10.0  # 0..600: for calls in progress to end after SIGTERM

    def __post_init__(self) -> None:
        check_exposure(self.server, self.tenants)
        if self.max_queue_rows < 1:
            raise ValueError(f"max_queue_rows must be >= 1, got {self.max_queue_rows}")
        if self.sync is not None and not self.state_dir:
            raise ValueError("state_dir is needed for the parameter path")
        _check_drain(self.drain_s)


def _check_drain(drain_s: float) -> None:
    if not 0 <= drain_s <= 600:
        raise ValueError(f"drain_s must be 0..600, got {drain_s}")
