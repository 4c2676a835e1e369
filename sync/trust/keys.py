"""The private keys of the TUF roles: one ed25519 key per role, each in its own file (PEM, mode 0600).

A process may hold some of them only: the service needs the online ones (`snapshot`, `timestamp`, `desired`), a
publisher also `targets`, and `root` can stay in a drawer after `create`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner

from common.errors import KeyMissing

DESIRED: Final = "desired"
_BEGUN: Final = ".begun"
ROLES: Final = ("root", "targets", "snapshot", "timestamp", DESIRED)


class Keys:
    """The keys in one folder, read when they are first used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls, folder: Path, *, purpose: str | None = None) -> Keys:
        """Makes a new key for each role. Raises `KeyMissing` when a key is already there: none is ever overwritten.

        With a `purpose` (the store that they are for) the beginning is remembered until `finish`: where it was cut off,
        the next call of the same purpose goes on with the keys that it finds.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        keys = cls(folder)
        if purpose is None or not keys._has_begun(purpose):
            for role in ROLES:
                if keys.has(role):
                    raise KeyMissing(role, f"{keys._path(role)} exists and is not overwritten")
            if purpose is not None:
                _write_private(folder / _BEGUN, purpose.encode())
        for role in ROLES:
            if keys._is_cut_off(role):
                keys._path(role).unlink()  # nothing was signed with it
            if not keys.has(role):
                _write_private(keys._path(role), CryptoSigner.generate_ed25519().private_bytes)
        return keys

    def finish(self) -> None:
        """What the keys were created for is signed: from now on they are not to be created again."""
        (self.folder / _BEGUN).unlink(missing_ok=True)

    def has(self, *roles: str) -> bool:
        return all(self._path(role).is_file() for role in roles)

    def signer(self, role: str) -> CryptoSigner:
        path = self._path(role)
        try:
            if path.stat().st_mode & 0o077:
                raise KeyMissing(role, f"{path} can be read by others; its mode must be 0600")
            key = load_pem_private_key(path.read_bytes(), None)
        except OSError as exc:
            raise KeyMissing(role, f"{path} cannot be read: {exc.strerror}") from exc
        except ValueError as exc:
            raise KeyMissing(role, f"{path} is not a PEM key") from exc
        if not isinstance(key, Ed25519PrivateKey):
            raise KeyMissing(role, f"{path} is not an ed25519 key")
        return CryptoSigner(key)

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

    def _is_cut_off(self, role: str) -> bool:
        """Its file is there, and what is in it is no key."""
        if not self.has(role):
            return False
        try:
            load_pem_private_key(self._path(role).read_bytes(), None)
        except ValueError:
            return True
        return False

    def _path(self, role: str) -> Path:
        return self.folder / f"{role}.pem"


def _write_private(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
