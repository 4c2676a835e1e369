"""The private keys of the TUF roles, each in its own file: `ROLE.pem` (ed25519, mode 0600), further ones of the same
role `ROLE.2.pem` and so on. In place of a key there may be a command that signs with one (`external`).

A process may hold some of them only: the service needs the online ones (`snapshot`, `timestamp`, `desired`), a
publisher also `targets`, and `root` can stay in a drawer after `create`. Which of them count says signed metadata.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from securesystemslib.signer import CryptoSigner, Signer, SSlibKey

from common.errors import KeyMissing
from sync.disk import sync_folder
from sync.trust.external import COMMAND, PUBLIC, CommandSigner

DESIRED: Final = "desired"
_BEGUN: Final = ".begun"
_PRIVATE: Final = ".pem"
_ASIDE: Final = "retired"
ROLES: Final = ("root", "targets", "snapshot", "timestamp", DESIRED)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    """A private key, or what signs with one."""

    path: Path
    signer: Signer

    @property
    def keyid(self) -> str:
        return str(self.signer.public_key.keyid)

    @property
    def is_external(self) -> bool:
        return self.path.suffix == COMMAND


class Keys:
    """The keys in some folders, read when they are used. New ones go to the first folder, unless it is said where."""

    def __init__(self, folder: Path, *others: Path) -> None:
        self.folder, self.folders = folder, (folder, *others)

    @classmethod
    def create(cls, folder: Path, *, purpose: str | None = None) -> Keys:
        """Makes a new key for each role that has no command to sign. Raises `KeyMissing` when a key is already there:
        none is ever overwritten.

        With a `purpose` (the store that they are for) the beginning is remembered until `finish`: where it was cut off,
        the next call of the same purpose goes on with the keys that it finds.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        keys = cls(folder)
        if purpose is None or not keys._has_begun(purpose):
            for role in ROLES:
                if (path := folder / f"{role}{_PRIVATE}").is_file():
                    raise KeyMissing(role, f"{path} exists and is not overwritten")
            if purpose is not None:
                _write_private(folder / _BEGUN, purpose.encode())
        for role in ROLES:
            if not keys._paths(role, COMMAND):
                make_key(folder / f"{role}{_PRIVATE}")
        return keys

    def finish(self) -> None:
        """What the keys were created for is signed: from now on they are not to be created again."""
        (self.folder / _BEGUN).unlink(missing_ok=True)

    def has(self, *roles: str) -> bool:
        return all(self._paths(role, _PRIVATE, COMMAND) for role in roles)

    def signer(self, role: str) -> Signer:
        """Of the role's first key."""
        found = self._paths(role, _PRIVATE, COMMAND) or [self.folder / f"{role}{_PRIVATE}"]
        return _key_file(role, found[0]).signer

    def files(self, role: str) -> tuple[KeyFile, ...]:
        """Every key of the role that is here. Raises `KeyMissing` where one cannot be read, or others can read it."""
        return tuple(_key_file(role, path) for path in self._paths(role, _PRIVATE, COMMAND))

    def free_paths(self, role: str, folders: tuple[Path, ...]) -> tuple[Path, ...]:
        """For new keys of a role, one in each of `folders`: names that are not taken."""
        taken = {path.with_suffix(_PRIVATE) for path in self._paths(role, _PRIVATE, COMMAND, PUBLIC)}
        found = []
        for folder in folders:
            names = [f"{role}{_PRIVATE}", *(f"{role}.{number}{_PRIVATE}" for number in range(2, len(taken) + 3))]
            found.append(next(folder / name for name in names if folder / name not in taken))
            taken.add(found[-1])
        return tuple(found)

    def set_aside(self, key: KeyFile) -> None:
        """Moves a key that does not count any more out of use."""
        aside = key.path.parent / _ASIDE
        aside.mkdir(mode=0o700, exist_ok=True)
        role = key.path.name.partition(".")[0]
        for path in (key.path, key.path.with_suffix(PUBLIC)):
            if path.is_file():
                path.replace(aside / f"{role}.{key.keyid[:16]}{path.suffix}")
        sync_folder(aside)
        sync_folder(key.path.parent)

    def _has_begun(self, purpose: str) -> bool:
        """A beginning that was cut off before it said what for is none."""
        path = self.folder / _BEGUN
        try:
            begun = path.read_bytes()
        except FileNotFoundError:
            return False
        if begun != purpose.encode() and not self.has(ROLES[0]):
            path.unlink()
            return False
        return begun == purpose.encode()

    def _paths(self, role: str, *suffixes: str) -> list[Path]:
        pattern = re.compile(rf"{re.escape(role)}(?:\.([1-9][0-9]*))?({'|'.join(map(re.escape, suffixes))})")
        found = []
        for number, folder in enumerate(self.folders):
            names = [] if not folder.is_dir() else sorted(path.name for path in folder.iterdir())
            found += [(number, int(m[1] or 1), folder / m[0]) for m in map(pattern.fullmatch, names) if m]
        return [path for _, _, path in sorted(found)]


def make_key(path: Path) -> None:
    """A new private key at `path`. One that is there stays, unless it was cut off as it was written."""
    if path.is_file() and _is_cut_off(path):
        path.unlink()  # nothing was signed with it
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_private(path, CryptoSigner.generate_ed25519().private_bytes)
        sync_folder(path.parent)


def read_public(path: Path) -> SSlibKey:
    """A public ed25519 key from a PEM file. Raises `KeyMissing`."""
    try:
        return parse_public(path.read_bytes(), path)
    except OSError as exc:
        raise KeyMissing(path.stem, f"{path} cannot be read: {exc.strerror}") from exc


def parse_public(data: bytes, path: Path) -> SSlibKey:
    try:
        key = load_pem_public_key(data)
    except ValueError as exc:
        raise KeyMissing(path.stem, f"{path} is not a public key in PEM") from exc
    if not isinstance(key, Ed25519PublicKey):
        raise KeyMissing(path.stem, f"{path} is not an ed25519 key")
    return SSlibKey.from_crypto(key)


def _key_file(role: str, path: Path) -> KeyFile:
    if path.suffix == COMMAND:
        return KeyFile(path=path, signer=CommandSigner.read(role, path, read_public(path.with_suffix(PUBLIC))))
    try:
        if path.stat().st_mode & 0o077:
            raise KeyMissing(role, f"{path} can be read by others; its mode must be 0600")
        key = load_pem_private_key(path.read_bytes(), None)
    except OSError as exc:
        raise KeyMissing(role, f"{path} cannot be read: {exc.strerror}") from exc
    except (ValueError, TypeError) as exc:  # TypeError: it wants a password
        raise KeyMissing(role, f"{path} is not a PEM key (or has a password)") from exc
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyMissing(role, f"{path} is not an ed25519 key")
    return KeyFile(path=path, signer=CryptoSigner(key))


def _is_cut_off(path: Path) -> bool:
    """What is in it is no key."""
    try:
        load_pem_private_key(path.read_bytes(), None)
    except ValueError:
        return True
    return False


def _write_private(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
