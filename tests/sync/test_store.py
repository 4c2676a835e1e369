from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import StoreBusy
from sync.store import Store, write_atomic

A, B = "aa" * 32, "bb" * 32


def test_objects_are_created_once_and_never_changed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.put_full(A, b"first")
    assert not store.put_full(A, b"second")
    assert store.full(A) == b"first"


def test_the_smallest_object_for_the_bases_is_picked(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_full(A, b"x" * 100)
    store.put_delta(A, B, b"x" * 10)
    assert len(store.smallest(A, (B,)) or b"") == 10
    assert len(store.smallest(A, ()) or b"") == 100
    assert len(store.smallest(A, ("cc" * 32,)) or b"") == 100
    assert store.smallest(B, (A,)) is None


def test_leftovers_of_a_crash_are_never_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)

    def die(fd: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", die)
        with pytest.raises(KeyboardInterrupt):
            store.put_full(A, b"half")
    (tmp_path / "objects" / A[:2] / ".tmp-0011223344556677").write_bytes(b"half")
    assert store.full(A) is None
    assert store.put_full(A, b"whole")
    assert store.full(A) == b"whole"


def test_names_do_not_lead_out_of_the_signed_folders(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    (tmp_path / "secret").write_bytes(b"key")
    store.replace("metadata/timestamp.json", b"{}")
    (tmp_path / "store/lock").touch()
    for name in (
        "../secret",
        "metadata/../../secret",
        "/etc/passwd",
        "lock",
        "metadata",
        "metadata/",
        "metadata/.tmp-1",
    ):
        assert store.read(name) is None
    assert store.read("objects/aa/x") is None
    assert store.read("metadata/timestamp.json") == b"{}"
    assert store.read("metadata/" + "x" * 300) is None


def test_there_is_one_writer_at_a_time(tmp_path: Path) -> None:
    with Store(tmp_path).lock(), pytest.raises(StoreBusy), Store(tmp_path).lock(0.05):
        pass
    with Store(tmp_path).lock(0.0):
        pass


def test_atomic_writes_replace_the_whole_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", b"long old content")
    write_atomic(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
