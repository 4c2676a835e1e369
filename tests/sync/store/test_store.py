from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import StoreBusy
from sync.disk import write_atomic
from sync.store import Store, index_name, object_name, pack_name

A, B = "aa" * 32, "bb" * 32


def test_objects_are_created_once_and_never_changed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.put_full(A, b"first")
    assert not store.put_full(A, b"second")
    assert store.full(A) == b"first"


def test_a_part_of_a_file_is_as_much_of_it_as_there_is(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_full(A, b"0123456789")
    name = object_name(A)
    assert store.part(name, 0, 100) == (10, b"0123456789")
    assert store.part(name, 3, 4) == (10, b"3456")
    assert store.part(name, 8, 4) == (10, b"89")
    assert store.part(name, 10, 1) == store.part(name, 1 << 64, 1) == (10, b"")
    assert store.part(object_name(B), 0, 1) is None
    assert store.part("objects/aa", 0, 1) is None


def test_a_pack_appears_whole_and_is_found_by_its_index(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(TypeError), store.new_pack(A, B) as file:
        file.writelines([b"half", None])  # type: ignore[list-item]
    assert store.part(pack_name(A, B), 0, 9) is None
    with store.new_pack(A, B) as file:
        file.write(b"whole")
    assert store.index(A, B) is None
    store.put_index(A, B, b"index")
    assert (store.index(A, B), store.part(pack_name(A, B), 0, 9)) == (b"index", (5, b"whole"))
    store.drop_pack(A, B)
    assert store.index(A, B) is store.part(pack_name(A, B), 0, 9) is None


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
        assert store.part(name, 0, 10) is None
    for name in ("objects/../metadata/timestamp.json", "packs/../lock", "objects/.tmp-1", "objects//x"):
        assert store.part(name, 0, 10) is None
    assert store.read("objects/aa/x") is None
    assert store.part("metadata/timestamp.json", 0, 10) is None
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


def test_a_listing_shows_every_file_with_its_size_and_what_is_unfinished(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_full(A, b"12345")
    store.replace("metadata/timestamp.json", b"{}")
    (tmp_path / "objects/aa/.tmp-01").write_bytes(b"half")
    (tmp_path / "objects/elsewhere").symlink_to("/etc")
    found = {one.name: (one.size, one.is_temporary) for one in store.files("objects", "packs")}
    link = found.pop("objects/elsewhere")
    assert found == {object_name(A): (5, False), "objects/aa/.tmp-01": (4, True)}
    assert link[1] is False
    assert {one.name for one in store.files()} == {*found, "objects/elsewhere", "metadata/timestamp.json"}
    assert list(Store(tmp_path / "none").files()) == []


def test_what_was_removed_stays_removed_after_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, synced = Store(tmp_path), []
    store.put_index(A, B, b"index")
    store.put_full(A, b"object")
    store.sync()
    monkeypatch.setattr("sync.store.folder.sync_folder", synced.append)
    for name in (index_name(A, B), object_name(A), object_name(B)):
        store.remove(name)
    store.remove_empty(f"packs/{A}")
    store.remove_empty("objects")
    store.sync()
    assert {tmp_path / "packs", tmp_path / "objects/aa"} <= set(synced)
    assert [path.name for path in tmp_path.glob("*/*")] == ["aa"]
    assert store.size(object_name(A)) is None
