"""Keys that are somewhere else: a real script signs, well or badly."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from common.errors import KeyMissing
from sync.store import Store
from sync.trust.external import CommandSigner
from sync.trust.keys import Keys, read_public
from sync.trust.repository import Repository
from tests.sync.trust.places import Place, served

SIGN = """
import base64, sys
from cryptography.hazmat.primitives.serialization import load_pem_private_key
key = load_pem_private_key(open(sys.argv[1], "rb").read(), None)
signature = key.sign(sys.stdin.buffer.read())
print(base64.b64encode(signature).decode() if sys.argv[2] == "base64" else signature.hex())
"""


def move_out(keys: Keys, role: str, form: str = "hex") -> Path:
    """Puts a role's key behind a command; returns the command's file."""
    (key,) = keys.files(role)
    vault = keys.folder.parent / f"vault-{role}.pem"
    key.path.rename(vault)
    public = key.signer.public_key.keyval["public"]
    return describe(
        keys.folder / f"{role}.signer", [sys.executable, "-c", SIGN, str(vault), form], bytes.fromhex(public)
    )


def describe(path: Path, argv: Sequence[str], public: bytes) -> Path:
    path.write_text(json.dumps(argv))
    path.chmod(0o600)
    pem = Ed25519PublicKey.from_public_bytes(public).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(pem)
    return path


@pytest.mark.parametrize("form", ["hex", "base64"])
def test_a_command_signs_what_nodes_believe(tmp_path: Path, form: str) -> None:
    place = Place(tmp_path)
    move_out(place.keys, "timestamp", form)
    place.publish()
    assert served(place.node().refresh()) == "1"


def test_a_store_begins_with_commands_that_are_there(tmp_path: Path) -> None:
    made = Keys.create(tmp_path / "made")
    move_out(made, "root")
    (tmp_path / "keys").mkdir()
    for name in ("root.signer", "root.pub"):
        (made.folder / name).rename(tmp_path / "keys" / name)
    keys = Keys.create(tmp_path / "keys")
    Repository(Store(tmp_path / "store"), keys).create()
    assert not (tmp_path / "keys/root.pem").exists()


def test_a_key_gives_way_to_a_command(tmp_path: Path) -> None:
    place = Place(tmp_path)
    private = Ed25519PrivateKey.generate()
    vault = tmp_path / "vault.pem"
    vault.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    argv = [sys.executable, "-c", SIGN, str(vault), "hex"]
    command = describe(place.keys.folder / "timestamp.2.signer", argv, private.public_key().public_bytes_raw())
    place.rotation().rotate("timestamp", public=[command.with_suffix(".pub")])
    assert [one.path.name for one in place.keys.files("timestamp")] == ["timestamp.2.signer"]
    place.publish()
    assert served(place.node().refresh()) == "1"
    with pytest.raises(KeyMissing, match="--public"):
        place.rotation().rotate("timestamp")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("import time; time.sleep(60)", "no signature within 0.2 s"),
        ("print('00' * 64)", "did not print a signature of the key"),
        ("print('no signature')", "did not print a signature of the key"),
        ("pass", "did not print a signature of the key"),
        ("print('00' * 10_000_000)", "did not print a signature of the key"),
    ],
)
def test_a_command_that_does_not_sign_is_an_error_that_says_why(tmp_path: Path, script: str, problem: str) -> None:
    public = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    path = describe(tmp_path / "root.signer", [sys.executable, "-S", "-c", script], public)
    argv = json.loads(path.read_text())
    key = read_public(path.with_suffix(".pub"))
    signer = CommandSigner("root", path, argv, key, timeout_s=0.2 if "sleep" in script else 30.0)
    with pytest.raises(KeyMissing, match=problem) as told:
        signer.sign(b"bytes")
    assert str(path) in str(told.value)
    assert "no signature" not in str(told.value).replace("gave no signature", "")  # what it prints is never shown


@pytest.mark.parametrize("text", ["no json", "{}", "[]", '"sign"', '["sign", 3]', "[" * 100_000])
def test_a_file_that_is_no_command_is_refused(tmp_path: Path, text: str) -> None:
    keys = Keys.create(tmp_path)
    path = move_out(keys, "root")
    path.write_text(text)
    with pytest.raises(KeyMissing, match="list of words"):
        keys.files("root")


def test_a_command_that_others_may_write_is_not_run(tmp_path: Path) -> None:
    keys = Keys.create(tmp_path)
    path = move_out(keys, "root")
    path.chmod(0o620)
    with pytest.raises(KeyMissing, match="written by others"):
        keys.signer("root")
    path.chmod(0o644)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert keys.signer("root").sign(b"x").keyid == keys.signer("root").public_key.keyid


def test_a_command_without_its_public_key_or_program_is_named(tmp_path: Path) -> None:
    keys = Keys.create(tmp_path)
    path = move_out(keys, "root")
    path.write_text(json.dumps([str(tmp_path / "nowhere")]))
    with pytest.raises(KeyMissing, match="cannot be run: No such file"):
        keys.signer("root").sign(b"x")
    path.with_suffix(".pub").unlink()
    with pytest.raises(KeyMissing, match=r"root\.pub cannot be read"):
        keys.signer("root")
