"""`outrider sync keys init | status | rotate | revoke | delegate`: what is done with the signing keys by hand."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sync.trust.change import Plan
    from sync.trust.rotation import Rotation

Commands = argparse._SubParsersAction


def add_keys(commands: Commands[argparse.ArgumentParser]) -> None:
    keys = commands.add_parser("keys", help="signing keys").add_subparsers(required=True, metavar="COMMAND")
    _add_init(keys)
    _add_status(keys)
    _add_rotate(keys)
    _add_revoke(keys)
    _add_delegate(keys)


def _add_init(keys: Commands[argparse.ArgumentParser]) -> None:
    init = keys.add_parser("init", help="make one key per role, sign the first root and an empty store")
    init.add_argument("--keys", type=Path, required=True, help="folder for the private keys (made with mode 0700)")
    init.add_argument("--store", required=True, help="the store: a folder, or s3://bucket/prefix")
    init.add_argument("--root", type=Path, help="also write root.json here: nodes are given this file")
    init.add_argument("--if-absent", action="store_true", help="do nothing when the store is signed already")
    init.set_defaults(run=_init)


def _add_status(keys: Commands[argparse.ArgumentParser]) -> None:
    status = keys.add_parser("status", help="how long each signature holds; exit 1 where one is past half of its life")
    status.add_argument("--store", required=True, help="the store: a folder, or s3://bucket/prefix")
    several = "folder with private keys: says which roles they can sign (several: give it again)"
    status.add_argument("--keys", type=Path, action="append", help=several)
    status.add_argument("--json", action="store_true", help="one line on stdout")
    status.set_defaults(run=_status)


def _add_rotate(keys: Commands[argparse.ArgumentParser]) -> None:
    rotate = keys.add_parser("rotate", help="replace a role's keys by new ones; cut off, the same call completes it")
    rotate.add_argument("role", metavar="ROLE", help="root, targets, snapshot, timestamp, desired, or a delegated one")
    _add_places(rotate)
    rotate.add_argument("--threshold", type=int, help="so many of its keys have to sign from now on (as before)")
    rotate.add_argument("--add", type=int, help="make so many more keys and replace none")
    rotate.set_defaults(run=_rotate)


def _add_revoke(keys: Commands[argparse.ArgumentParser]) -> None:
    revoke = keys.add_parser("revoke", help="withdraw a key: what only it signed is refused by nodes from then on")
    revoke.add_argument("keyid", metavar="KEYID", help="as `keys status` shows it, at least 8 digits")
    _add_places(revoke)
    revoke.set_defaults(run=_revoke)


def _add_delegate(keys: Commands[argparse.ArgumentParser]) -> None:
    delegate = keys.add_parser("delegate", help="give models a role of their own, whose keys sign their releases")
    delegate.add_argument("models", metavar="MODEL_PATTERN", help="a model's name, with * and ?")
    delegate.add_argument("--name", required=True, help="of the role: a-z, 0-9, - and _")
    _add_places(delegate)
    delegate.add_argument("--threshold", type=int, help="so many of its keys have to sign (1)")
    delegate.add_argument("--add", type=int, help="make so many keys for a new role (1)")
    delegate.set_defaults(run=_delegate)


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", required=True, help="the store: a folder, or s3://bucket/prefix")
    several = "folder with private keys, new ones included (several: give it again)"
    parser.add_argument("--keys", type=Path, action="append", required=True, help=several)
    public = "a public key in PEM to take in place of a new one (several: give it again)"
    parser.add_argument("--public", type=Path, action="append", default=[], help=public)


def _init(args: argparse.Namespace) -> int:
    from common.errors import ConfigError
    from sync.disk import write_atomic
    from sync.store import TIMESTAMP
    from sync.store.stores import folder_of, open_store
    from sync.trust.keys import Keys
    from sync.trust.repository import Repository

    place = folder_of(args.store)
    for flag, folder in (("--keys", args.keys), *(() if place is None else (("--store", place),))):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700 if flag == "--keys" else 0o755)
        except OSError as exc:
            problem = f"{folder} cannot be used: {exc.strerror}"
            raise ConfigError("sync keys init", flag, problem, "a folder to write in") from exc
    store = open_store(args.store)
    with store.lock():
        if args.if_absent and store.read(TIMESTAMP) is not None:
            keys = Keys(args.keys)
            root = Repository(store, keys).root()
        else:
            keys = Keys.create(args.keys, purpose=str(args.store if place is None else place.resolve()))
            root = Repository(store, keys).create()
        keys.finish()
    if args.root is not None:
        write_atomic(args.root, root)
    print(f"keys in {args.keys}, signed metadata in {args.store}", file=sys.stderr)
    return 0


def _status(args: argparse.Namespace) -> int:
    from common.clock import SystemClock
    from sync.store.stores import open_store
    from sync.trust.keys import Keys
    from sync.trust.repository import Lives, Repository
    from sync.trust.status import role_status

    keys = Keys(*args.keys) if args.keys else None
    repository = Repository(open_store(args.store), keys or Keys(Path()))
    found = role_status(repository, keys, SystemClock().now(), lives=Lives())
    if args.json:
        print(json.dumps({"roles": [one.to_dict() for one in found]}))
    else:
        width = max(len(one.role) for one in found)
        for one in found:
            signs = "" if keys is None else ", can be signed" if one.can_sign else ", its key is not here"
            state = "EXPIRED" if one.is_expired else "past half of its life" if one.is_due else "good"
            ids = " ".join(keyid[:8] for keyid in one.keyids)
            when = f"version {one.version}, until {one.expires:%Y-%m-%d %H:%M} ({100 * one.left:.0f} % left)"
            models = f", models {' '.join(one.models)}" if one.models else ""
            print(f"{one.role:{width}}  {when}, {one.threshold} of [{ids}]{signs}{models}: {state}")
    return 1 if any(one.is_due for one in found) else 0


def _rotate(args: argparse.Namespace) -> int:
    def rotate(rotation: Rotation) -> Sequence[Plan]:
        return [rotation.rotate(args.role, threshold=args.threshold, add=args.add, public=args.public)]

    return _changed(args, rotate)


def _revoke(args: argparse.Namespace) -> int:
    return _changed(args, lambda rotation: rotation.revoke(args.keyid, public=args.public))


def _delegate(args: argparse.Namespace) -> int:
    def delegate(rotation: Rotation) -> Sequence[Plan]:
        options = {"threshold": args.threshold, "add": args.add, "public": args.public}
        return [rotation.delegate(args.name, args.models, **options)]

    return _changed(args, delegate)


def _changed(args: argparse.Namespace, change: Callable[[Rotation], Sequence[Plan]]) -> int:
    """Under the store's lock; then says what became of it."""
    from common.errors import ConfigError
    from sync.store.stores import folder_of, open_store
    from sync.trust.keys import Keys
    from sync.trust.repository import Repository
    from sync.trust.rotation import Rotation

    place = folder_of(args.store)
    stores = () if place is None else (("--store", place),)
    for flag, folder in (*stores, *(("--keys", one) for one in args.keys)):
        if not folder.is_dir():
            raise ConfigError("sync keys", flag, f"{folder} is not there", "a folder that `keys init` made")
    for flag, number, least in (
        ("--threshold", getattr(args, "threshold", None), 1),
        ("--add", getattr(args, "add", None), 0),
    ):
        if number is not None and number < least:
            raise ConfigError("sync keys", flag, f"is {number}", f"{least} or more")
    store, keys = open_store(args.store), Keys(*args.keys)
    repository = Repository(store, keys)
    with store.lock():
        plans = change(Rotation(store, keys, repository))
        if not plans:
            print("it counts no more: nothing to do", file=sys.stderr)
        for plan in plans:
            signers = repository.signers(plan.role)
            ids = " ".join(keyid[:8] for keyid in signers.keys)
            print(f"role {plan.role}: {signers.threshold} of [{ids}] sign from now on", file=sys.stderr)
            for path in plan.new:
                print(f"  new key: {path}", file=sys.stderr)
    return 0
