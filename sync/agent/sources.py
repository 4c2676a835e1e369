"""Which `Source` an address means: host:port (gRPC), http:// or https:// (a web server), s3://bucket/prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import ConfigError
from sync.agent.client import GrpcSource
from sync.agent.ports import Source
from sync.pki.channel import CertifiedDialer, PlainDialer

if TYPE_CHECKING:
    from sync.pki.identity import Identity


def source_of(
    address: str, *, timeout_s: float, identity: Identity | None = None, rate_bytes_s: float | None = None
) -> Source:
    """Nothing is dialled yet; gRPC with an `identity` is mutual TLS. `rate_bytes_s` limits what a gRPC source reads.

    Raises `ConfigError` for no address.
    """
    scheme = address.partition("://")[0] if "://" in address else ""
    if scheme in ("http", "https"):
        from sync.agent.http_source import HttpSource

        return HttpSource(address, timeout_s=timeout_s)
    if scheme == "s3":
        from sync.agent.s3_source import S3Source

        return S3Source(address, timeout_s=timeout_s)
    if scheme:
        accepted = "HOST:PORT of a sync service, or http://, https://, s3://BUCKET/PREFIX"
        raise ConfigError("sync", "source", f"{scheme}:// is not known here", accepted)
    dialer = PlainDialer() if identity is None else CertifiedDialer(identity)
    return GrpcSource(address, timeout_s=timeout_s, dialer=dialer, rate_bytes_s=rate_bytes_s)
