"""The node's configuration file, as frozen dataclasses. `outrider edge run --config node.toml`."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.transport.servers import ServerOptions
from hardware.install import EngineOptions
from hardware.serving import StaticModel
from sync.agent.running import SyncOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    enabled: bool = True
    quota_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if self.quota_bytes < 1 << 20:
            raise ValueError(f"quota_bytes must be at least {1 << 20}, got {self.quota_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    name: str = "edge"
    state_dir: str = ""  # cache, journal and installed models; needed where any of these is used
    server: ServerOptions = field(default_factory=ServerOptions)
    gateway: str | None = None  # gRPC host:port of the cloud; None: the edge stands alone
    engine: EngineOptions = field(default_factory=EngineOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    models: tuple[StaticModel, ...] = ()
    sync: SyncOptions | None = None
    max_queue_rows: int = 256
    drain_s: float = 10.0

    def __post_init__(self) -> None:
        if self.max_queue_rows < 1:
            raise ValueError(f"max_queue_rows must be >= 1, got {self.max_queue_rows}")
        if not 0 <= self.drain_s <= 600:
            raise ValueError(f"drain_s must be 0..600, got {self.drain_s}")
        if not self.state_dir and (self.sync is not None or self.cache.enabled):
            raise ValueError("state_dir is needed for the parameter path and for the cache")
