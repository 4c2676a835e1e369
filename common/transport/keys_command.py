"""`outrider keys new --tenant NAME`: a new API key, shown once, and the table that makes a server accept it.

The key comes from the system's random source and goes to standard output, or into a file of mode 0600: never into an
argument list or a log.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from common.errors import ConfigError


def register(subcommands: Any) -> None:
    keys = subcommands.add_parser("keys", help="make API keys for callers")
    actions = keys.add_subparsers(required=True, metavar="ACTION")
    action = actions.add_parser("new", help="a new key, and the table of its hash for a server's configuration")
    action.add_argument("--tenant", required=True, help="whom the key names")
    action.add_argument("--out", type=Path, help="write the key into this new file (mode 0600) instead of showing it")
    action.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from common.transport.tenants import TenantOptions, key_sha256, new_key

    key = new_key()
    try:
        tenant = TenantOptions(name=args.tenant, key_sha256=(key_sha256(key),))
    except ValueError as exc:
        raise ConfigError("outrider keys new", "--tenant", str(exc)) from exc
    if args.out is None:
        print(f"# The key. It is not shown again:\n{key}\n")
    else:
        _write(args.out, key)
        print(f"# The key is in {args.out}.\n")
    print("# For the servers that it calls. A second key of the same tenant goes into the same list:")
    print(f'[[tenants]]\nname = "{tenant.name}"\nkey_sha256 = ["{tenant.key_sha256[0]}"]')
    return 0


def _write(path: Path, key: str) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(f"{key}\n")
    except OSError as exc:
        raise ConfigError("outrider keys new", "--out", f"{path}: {exc.strerror}", "a path where no file is") from exc
