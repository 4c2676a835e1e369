"""Space is taken before anything is fetched."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import NoSpace
from sync.agent import space
from sync.agent.failpoints import stopping
from sync.release import FileEntry
from tests.sync.fakes import FakeInstaller, World, trained, weights


def entry(path: str, size: int) -> FileEntry:
    return FileEntry(path=path, size=size, digest="ab" * 32, tensors=(), slabs=())


def test_every_file_is_allocated_in_full_and_keeps_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"fetched before")
    space.reserve(tmp_path, [entry("a", 100_000), entry("b/c", 50_000), entry("empty", 0)])
    assert (tmp_path / "a").read_bytes().startswith(b"fetched before\0")
    assert {path.name: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()} == {
        "a": 100_000,
        "c": 50_000,
        "empty": 0,
    }
    assert (tmp_path / "a").stat().st_blocks * 512 >= 100_000


def test_a_longer_leftover_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(500))
    space.reserve(tmp_path, [entry("a", 100)])
    assert (tmp_path / "a").stat().st_size == 100


def test_other_errors_are_passed_on(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError):
        space.reserve(tmp_path, [entry("a", 100)])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """12 MiB of their own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "outrider-test", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no right to mount a small disk here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_rollout_case_10_a_disk_that_is_too_small_is_found_before_anything_is_fetched(
    small_disk: Path, world: World
) -> None:
    world.publish(weights())
    installer = FakeInstaller()
    with world.agent(installer, str(small_disk)) as agent:
        assert agent.run_once()
        fill(small_disk / "other", leave=space.SPARE_BYTES + 20_000)  # the next version has 60 KB
        world.publish(trained(weights()))
        world.source.fetched.clear()
        for _ in range(3):
            assert not agent.run_once()
            (status,) = agent.status()
            assert (status.state, status.code, status.active) == ("WAITING", "DISK_FULL", "1")
            assert "bytes are needed" in status.reason
        assert world.source.fetched == []
        assert list((small_disk / "staging/digits").iterdir()) == []  # nothing is kept from others
        (small_disk / "other").unlink()
        assert agent.run_once()  # nobody had to do anything here
    assert installer.serving == {"digits": "2"}


@pytest.mark.parametrize(("missing", "state"), [(4096, "WAITING"), (0, "COMMITTED")])  # bytes: a page of the disk
def test_rollout_case_10_what_is_needed_to_the_page_is_enough_and_a_page_less_is_refused(
    small_disk: Path, world: World, missing: int, state: str
) -> None:
    world.publish(weights())
    with world.agent(FakeInstaller(), str(small_disk)) as agent:
        assert agent.run_once()
    manifest = world.publisher.manifest("digits", world.publish(trained(weights())).version)
    assert manifest is not None
    names = manifest.files_for(manifest.variants[0], "onnxruntime")
    needed = sum(-(-file.size // 4096) * 4096 for file in manifest.files if file.path in names)

    def stop(name: str) -> None:
        if name == "admitted":  # its space is taken next
            fill(small_disk / "other", leave=needed + space.SPARE_BYTES - missing)

    installer = FakeInstaller()
    with stopping(stop), world.agent(installer, str(small_disk)) as agent:
        agent.restore()
        assert agent.run_once() is (missing == 0)
        (status,) = agent.status()
    assert status.state == state
    assert installer.serving == {"digits": "1" if missing else "2"}
    if missing:
        assert (status.code, status.active) == ("DISK_FULL", "1")


def fill(path: Path, *, leave: int) -> None:
    found = os.statvfs(path.parent)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - leave)


def test_without_room_nothing_is_left_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where no disk can be mounted."""
    world.publish(weights())
    installer, allocated = FakeInstaller(), []

    def fallocate(fd: int, offset: int, length: int) -> None:
        if allocated:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocated.append(length)

    with world.agent(installer) as agent:
        with monkeypatch.context() as patch:
            patch.setattr("os.posix_fallocate", fallocate)
            assert not agent.run_once()
        (status,) = agent.status()
        assert (status.state, status.code) == ("WAITING", "DISK_FULL")
        assert list((world.folder / "node/staging/digits").iterdir()) == []
        assert agent.run_once()
    assert installer.serving == {"digits": "1"}


def test_the_message_says_how_much_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "_free", lambda folder: 1000)
    with pytest.raises(NoSpace, match=f"{space.SPARE_BYTES} bytes are needed, 1000 are free"):
        space.reserve(tmp_path, [entry("a", 10)])
