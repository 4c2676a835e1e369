"""The configuration of a Mosquitto that lets in nodes and services by their certificates, as the embedded broker does.

Mosquitto's patterns know a client's name, not its group: here a node may hear every group's hints, which are signed and
no secret. A revocation reaches new connections after a reload (SIGHUP); one that exists lasts until it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sync.disk import write_atomic
from sync.pki.authority import SERVICE, Authority, names_of
from sync.pki.files import write_private
from sync.pki.topics import HINTS, NODES

_NAME: Final = "outrider-mosquitto"
_ACL: Final = f"""\
# Written by `outrider sync ca mosquitto`. %u is the name in the client's certificate.
user {SERVICE}
topic readwrite {HINTS}#
topic read {NODES}#

pattern read {HINTS}+
pattern readwrite {NODES}%u/#
"""


def write_mosquitto(authority: Authority, out: Path, *, host: str, port: int, dns: Sequence[str]) -> Path:
    """Writes mosquitto.conf and what it names into `out`; every later revocation renews crl.pem there.

    Run again before the server's certificate ends (30 days): it is issued anew once two thirds are over.
    """
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True, mode=0o755)
    pem = (authority.server(_NAME, names_of(host, dns)) / "identity.pem").read_bytes()
    at = pem.index(b"-----BEGIN CERTIFICATE")
    write_private(out / "server.key", pem[:at])
    write_atomic(out / "server.pem", pem[at:])
    write_atomic(out / "ca.pem", authority.root)
    authority.export_list(out / "crl.pem")
    write_atomic(out / "acl", _ACL.encode())
    path = out / "mosquitto.conf"
    write_atomic(path, _configuration(out, host, port).encode())
    return path


def _configuration(out: Path, host: str, port: int) -> str:
    return f"""\
# Written by `outrider sync ca mosquitto`. After a revocation, and after writing this again:
#   kill -HUP $(cat {out}/mosquitto.pid)     (or `systemctl reload mosquitto`)
# The user that Mosquitto runs as has to read server.key: `chown mosquitto {out}/server.key`.
per_listener_settings false
allow_anonymous false
listener {port} {host}
cafile {out}/ca.pem
certfile {out}/server.pem
keyfile {out}/server.key
crlfile {out}/crl.pem
require_certificate true
use_identity_as_username true
tls_version tlsv1.2
acl_file {out}/acl
pid_file {out}/mosquitto.pid
set_tcp_nodelay true
persistence false
"""
