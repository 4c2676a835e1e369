from __future__ import annotations

import stat
from pathlib import Path

import pytest

from common.errors import KeyMissing
from sync.trust.keys import ROLES, Keys


def test_there_is_one_private_key_per_role(tmp_path: Path) -> None:
    keys = Keys.create(tmp_path / "keys")
    assert len({keys.signer(role).public_key.keyid for role in ROLES}) == len(ROLES) == 5
    for path in (tmp_path / "keys").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    keys = Keys.create(tmp_path)
    before = keys.signer("root").public_key
    with pytest.raises(KeyMissing, match="not overwritten"):
        Keys.create(tmp_path)
    assert keys.signer("root").public_key == before


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    keys = Keys.create(tmp_path)
    (tmp_path / "targets.pem").chmod(0o640)
    with pytest.raises(KeyMissing, match="0600"):
        keys.signer("targets")


def test_a_missing_or_broken_key_is_named(tmp_path: Path) -> None:
    keys = Keys.create(tmp_path)
    (tmp_path / "root.pem").unlink()
    (tmp_path / "targets.pem").write_text("no key")
    assert not keys.has("root")
    for role in ("root", "targets"):
        with pytest.raises(KeyMissing, match=role):
            keys.signer(role)
