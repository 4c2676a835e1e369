"""A key that is somewhere else: `ROLE.signer` names a command that signs with it, `ROLE.pub` beside it the public half.

The file holds the command's arguments, a list in JSON; no shell. The bytes to sign go to its standard input, and it
prints the ed25519 signature in hex or base64. Nothing secret comes near this process; what the command prints is
checked against the public key before it is used, and never shown.
"""

from __future__ import annotations

import base64
import binascii
import json
import subprocess
from pathlib import Path
from typing import Any, Final

from securesystemslib.exceptions import UnverifiedSignatureError
from securesystemslib.signer import Key, SecretsHandler, Signature, Signer

from common.errors import KeyMissing

COMMAND: Final = ".signer"
PUBLIC: Final = ".pub"
TIMEOUT_S: Final = 60.0  # somebody may have to touch a token
_SIGNATURE_BYTES: Final = 64


class CommandSigner(Signer):
    """Signs by running a command."""

    def __init__(self, role: str, path: Path, argv: list[str], public: Key, *, timeout_s: float = TIMEOUT_S) -> None:
        self._role, self._path, self._argv = role, path, argv
        self._public, self._timeout_s = public, timeout_s

    @classmethod
    def read(cls, role: str, path: Path, public: Key) -> CommandSigner:
        """Raises `KeyMissing` where the file is no list of words, or others may write what is run here."""
        try:
            if path.stat().st_mode & 0o022:
                raise KeyMissing(role, f"{path} can be written by others; its mode must be 0600 or 0644")
            argv = json.loads(path.read_bytes())
        except OSError as exc:
            raise KeyMissing(role, f"{path} cannot be read: {exc.strerror}") from exc
        except (ValueError, RecursionError) as exc:
            raise KeyMissing(role, f"{path} is not JSON; accepted: a command as a list of words") from exc
        if not isinstance(argv, list) or not argv or not all(isinstance(word, str) and word for word in argv):
            raise KeyMissing(role, f"{path} is no command; accepted: a list of words, in JSON")
        return cls(role, path, argv, public)

    @classmethod
    def from_priv_key_uri(
        cls, priv_key_uri: str, public_key: Key, secrets_handler: SecretsHandler | None = None
    ) -> CommandSigner:
        raise NotImplementedError("a command is read from its file")

    @property
    def public_key(self) -> Key:
        return self._public

    def sign(self, payload: bytes) -> Signature:
        """Raises `KeyMissing` when the command fails, takes too long, or signs with another key."""
        signature = Signature(self._public.keyid, _decoded(self._run(payload)).hex())
        try:
            self._public.verify_signature(signature, payload)
        except UnverifiedSignatureError as exc:
            public = self._path.with_suffix(PUBLIC)
            raise self._failed(f"did not print a signature of the key in {public}") from exc
        return signature

    def _run(self, payload: bytes) -> bytes:
        try:
            done: subprocess.CompletedProcess[Any] = subprocess.run(
                self._argv, input=payload, stdout=subprocess.PIPE, timeout=self._timeout_s, check=False
            )
        except subprocess.TimeoutExpired as exc:
            raise self._failed(f"gave no signature within {self._timeout_s:g} s") from exc
        except OSError as exc:
            raise self._failed(f"cannot be run: {exc.strerror}") from exc
        if done.returncode:
            raise self._failed(f"ended with exit code {done.returncode}")
        return bytes(done.stdout)

    def _failed(self, problem: str) -> KeyMissing:
        return KeyMissing(self._role, f"the command in {self._path} {problem}")


def _decoded(printed: bytes) -> bytes:
    """Empty where it is neither hex nor base64 of a signature's length."""
    text = printed.strip()
    try:
        data = (
            bytes.fromhex(text.decode()) if len(text) == 2 * _SIGNATURE_BYTES else base64.b64decode(text, validate=True)
        )
    except (ValueError, binascii.Error):
        return b""
    return data if len(data) == _SIGNATURE_BYTES else b""
