"""`outrider sync ca init | token | revoke | mosquitto`, `outrider sync enrol`, the TLS flags of serve and broker.

A token is shown once, or written into a file of mode 0600; it is read from a file, never from an argument.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sync.pki.authority import Authority

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX_TTL_S: Final = 30 * 86_400.0
_Commands = argparse._SubParsersAction  # what argparse calls its subcommands


def add_ca(commands: _Commands[argparse.ArgumentParser]) -> None:
    ca = commands.add_parser("ca", help="certificates of devices").add_subparsers(required=True, metavar="COMMAND")
    init = ca.add_parser("init", help="make the CA: its key, its certificate, an empty revocation list")
    init.add_argument("--if-absent", action="store_true", help="do nothing where there is one already")
    init.set_defaults(run=_init)
    token = ca.add_parser("token", help="let one device enrol under a name, once")
    token.add_argument("node", metavar="NODE", help="the name in its certificate")
    token.add_argument("--group", default="default", help="whose hints it hears (%(default)s)")
    token.add_argument("--ttl", type=_seconds, default=3600.0, help="how long it is good for: 30m, 1h, 2d (1h)")
    token.add_argument("--out", type=Path, help="write the token into this new file (mode 0600) instead of showing it")
    token.set_defaults(run=_token)
    revoke = ca.add_parser("revoke", help="refuse a device's certificates from now on, and its open tokens")
    revoke.add_argument("what", metavar="NODE|SERIAL", help="a node's name, or one certificate's serial (hexadecimal)")
    revoke.set_defaults(run=_revoke)
    mosquitto = ca.add_parser("mosquitto", help="write the configuration of a Mosquitto with these certificates")
    mosquitto.add_argument("--out", type=Path, required=True, help="folder for mosquitto.conf and what it names")
    mosquitto.add_argument("--host", default="0.0.0.0", help="address to bind (%(default)s)")  # noqa: S104
    mosquitto.add_argument("--port", type=int, default=8883, help="port to bind (%(default)s)")
    mosquitto.add_argument("--dns", action="append", default=[], help="a name or address its clients use; repeatable")
    mosquitto.set_defaults(run=_mosquitto)
    for parser in (init, token, revoke, mosquitto):
        parser.add_argument("--ca", type=Path, required=True, help="the CA's folder (made with mode 0700)")


def add_enrol(commands: _Commands[argparse.ArgumentParser]) -> None:
    enrol = commands.add_parser("enrol", help="make this device's key and trade a token for its first certificate")
    enrol.add_argument("--service", required=True, metavar="HOST:PORT", help="the sync service's enrolment port")
    enrol.add_argument("--node", required=True, help="this device's name, as in the token")
    enrol.add_argument("--token-file", type=Path, required=True, help="file with the token (mode 0600)")
    enrol.add_argument("--identity", type=Path, required=True, help="folder for key and certificate (mode 0700)")
    enrol.add_argument("--ca-cert", type=Path, required=True, help="the CA's ca.pem, brought here by a trusted way")
    enrol.set_defaults(run=_enrol)


def add_serve_tls(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--ca", help="folder of the CA: TLS, and only callers with its certificates")
    serve.add_argument("--dns", action="append", help="a further name or address of this service; repeatable")
    serve.add_argument("--enrol-port", type=int, help="where devices trade a token for a certificate; 0: a free one")
    serve.add_argument("--certificate-days", type=float, help="life of nodes' certificates (7)")
    serve.add_argument("--insecure", action="store_true", default=None, help="serve other machines without TLS")


def add_broker_tls(broker: argparse.ArgumentParser) -> None:
    broker.add_argument("--ca", type=Path, help="folder of the CA: TLS, and only clients with its certificates")
    broker.add_argument("--dns", action="append", default=[], help="a further name of this broker; repeatable")
    broker.add_argument("--insecure", action="store_true", help="serve other machines without TLS")


def _init(args: argparse.Namespace) -> int:
    from sync.pki.authority import Authority

    authority = Authority.create(args.ca, if_absent=args.if_absent)
    print(f"the CA is in {args.ca}; nodes are given {authority.root_file}", file=sys.stderr)
    return 0


def _token(args: argparse.Namespace) -> int:
    from common.errors import ConfigError

    if args.out is not None and args.out.exists():
        raise ConfigError("outrider sync ca token", "--out", f"{args.out} exists", "a path where no file is")
    token = _authority(args).new_token(args.node, group=args.group, ttl_s=args.ttl)
    if args.out is None:
        print(token)
        return 0
    try:
        with os.fdopen(os.open(args.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(f"{token}\n")
    except OSError as exc:
        problem = f"{args.out}: {exc.strerror}"
        raise ConfigError("outrider sync ca token", "--out", problem, "a path where no file is") from exc
    print(f"the token is in {args.out}", file=sys.stderr)
    return 0


def _revoke(args: argparse.Namespace) -> int:
    serials, lists = _authority(args).revoke(args.what)
    print(f"revoked: {' '.join(serials) or 'its open tokens'}", file=sys.stderr)
    if len(lists) > 1:
        print(f"reload the brokers that read {' '.join(map(str, lists[1:]))} (SIGHUP)", file=sys.stderr)
    return 0


def _mosquitto(args: argparse.Namespace) -> int:
    from sync.pki.mosquitto import write_mosquitto

    path = write_mosquitto(_authority(args), args.out, host=args.host, port=args.port, dns=args.dns)
    print(f"mosquitto -c {path}", file=sys.stderr)
    return 0


def _enrol(args: argparse.Namespace) -> int:
    from common.errors import ConfigError
    from sync.pki.channel import enrol
    from sync.pki.files import read_private

    token = read_private(args.token_file, "outrider sync enrol").decode("utf-8", "replace").strip()
    try:
        roots = args.ca_cert.read_bytes()
    except OSError as exc:
        problem = f"{args.ca_cert} cannot be read: {exc.strerror}"
        raise ConfigError("outrider sync enrol", "--ca-cert", problem, "the CA's ca.pem") from exc
    facts = enrol(args.service, args.node, token, args.identity, roots)
    print(f"{facts.name!r} is enrolled, group {facts.group!r}, until {facts.ends:%Y-%m-%d %H:%M} UTC", file=sys.stderr)
    return 0


def _authority(args: argparse.Namespace) -> Authority:
    from sync.pki.authority import Authority

    return Authority(args.ca)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= _MAX_TTL_S:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: 30m, 1h, 2d ... at most 30d")
    return seconds
