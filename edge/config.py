"""The node's configuration file, as frozen dataclasses. `outrider edge run --config node.toml`."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.transport.servers import ServerOptions, check_exposure
from common.transport.tenants import TenantOptions
from hardware.install import EngineOptions
from hardware.serving import StaticModel
from sync.agent.running import SyncOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    enabled: bool = True  # keep answers on the disk, as each model's cache rules allow
    quota_bytes: int = 256 << 20  # 1048576..: the oldest answers go first

    def __post_init__(self) -> None:
        if self.quota_bytes < 1 << 20:
            raise ValueError(f"quota_bytes must be at least {1 << 20}, got {self.quota_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    name: str = "edge"  # the node's name in stamps (x-outrider-by) and the endpoint file
    state_dir: str = ""  # cache, journal and installed models; needed where any of these is used
    server: ServerOptions = field(default_factory=ServerOptions)  # where it listens
    tenants: tuple[TenantOptions, ...] = ()  # who may call; none: one tenant, and only this machine may
    gateway: str | None = None  # gRPC host:port of the cloud; none: the edge stands alone
    api_key_file: str | None = None  # file (mode 0600) with the key that the gateway knows this node by
    engine: EngineOptions = field(default_factory=EngineOptions)  # what it may run, and how
    cache: CacheOptions = field(default_factory=CacheOptions)  # answers kept on the disk
    models: tuple[StaticModel, ...] = ()  # bundles on this machine, served without the parameter path
    sync: SyncOptions | None = None  # the parameter path; none: nothing new arrives
    max_queue_rows: int = 1024  # 1..: most that wait for the device; more are refused, or answered by the cloud
    drain_s: float = 10.0  # 0..600: for calls in progress to end after SIGTERM

    def __post_init__(self) -> None:
        check_exposure(self.server, self.tenants)
        if self.max_queue_rows < 1:
            raise ValueError(f"max_queue_rows must be >= 1, got {self.max_queue_rows}")
        if not 0 <= self.drain_s <= 600:
            raise ValueError(f"drain_s must be 0..600, got {self.drain_s}")
        if not self.state_dir and (self.sync is not None or self.cache.enabled):
            raise ValueError("state_dir is needed for the parameter path and for the cache")
