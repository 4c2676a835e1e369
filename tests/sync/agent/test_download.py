"""Ranges over connections that break, and what is left of them on the disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from common.errors import FetchCancelled, FetchError, SlowSource
from sync.agent.download import FREE_BREAKS, Download
from sync.agent.fetch import Assembly, Fetched
from sync.agent.local import LocalSlabs, verify_files
from sync.agent.partial import Partials
from sync.agent.ports import Part, Range, never
from sync.agent.staging import PARTIALS
from sync.release import to_bytes
from tests.sync.agent.test_fetch import assemble, damage, installed, packs, release, three
from tests.sync.fakes import StoreSource, World, weights

PIECE = 700


class Pieces(StoreSource):
    """Streams in pieces; a call ends after `breaks_after` bytes with `error`."""

    breaks_after: int | None = None
    error_then: BaseException = FetchError("slabs", "connection reset")
    sent = 0

    def stream(self, ranges: Sequence[Range], *, cancelled: Callable[[], bool] = never) -> Iterator[Part]:
        left = self.breaks_after if self.breaks_after is not None else sys.maxsize
        for number, one in enumerate(ranges):
            (data,) = self.fetch([one])
            is_empty = one.offset > 0 and not one.length and not data
            if data is None and not is_empty:
                yield Part(number=number, data=b"", is_last=True, is_missing=True)
                continue
            data = data or b""
            for at in range(0, len(data) or 1, PIECE):
                if cancelled():
                    raise FetchCancelled("slabs")
                piece = data[at : at + min(PIECE, left)]
                left, self.sent = left - len(piece), self.sent + len(piece)
                if piece or not data:
                    yield Part(number=number, data=piece, is_last=at + len(piece) == len(data))
                if left <= 0:
                    raise self.error_then


NAME = "objects/dd/" + "dd" * 32 + ".full"
DATA = bytes(range(256)) * 40
WHOLE = Range(name=NAME, limit=20_000)
RANGES = [Range(name=NAME, offset=at, length=2000) for at in range(0, 10_000, 2000)]


@pytest.fixture
def source(world: World) -> Pieces:
    world.store.put_full("dd" * 32, DATA)
    return Pieces(world.store)


def download(source: StoreSource, folder: Path, cancelled: Callable[[], bool] = never) -> Download:
    return Download(source, Partials(folder / "partials"), cancelled)


@pytest.mark.parametrize("after", [1500, 2000, 2001, 9999])
def test_a_byte_that_came_is_not_asked_for_again(source: Pieces, tmp_path: Path, after: int) -> None:
    source.breaks_after = after
    one = download(source, tmp_path)
    assert [answer.data for answer in one.get([*RANGES, WHOLE])] == [
        *(DATA[each.offset : each.offset + 2000] for each in RANGES),
        DATA,
    ]
    assert one.breaks >= 2
    assert source.sent == 10_000 + len(DATA)


def test_a_source_that_gives_away_a_few_bytes_each_time_is_left(source: Pieces, tmp_path: Path) -> None:
    source.breaks_after = 1
    one = download(source, tmp_path)
    with pytest.raises(FetchError, match="reset"):
        list(one.get([WHOLE]))
    assert one.breaks < FREE_BREAKS + 5


@pytest.mark.parametrize(
    "error",
    [
        FetchError("slabs", "NOT_FOUND", is_permanent=True),
        SlowSource("slabs", received=3, seconds=20.0, floor_bytes_s=100.0),
        FetchCancelled("slabs"),
    ],
)
def test_only_what_may_pass_is_asked_for_again(source: Pieces, tmp_path: Path, error: Exception) -> None:
    source.breaks_after, source.error_then = 5000, error
    with pytest.raises(type(error)):
        list(download(source, tmp_path).get(RANGES))
    assert source.sent == 5000


def test_an_error_before_the_first_byte_is_the_callers(source: Pieces, tmp_path: Path) -> None:
    source.error = FetchError("slabs", "UNAVAILABLE")
    one = download(source, tmp_path)
    with pytest.raises(FetchError, match="UNAVAILABLE"):
        list(one.get(RANGES))
    assert one.breaks == 0


def test_what_is_kept_is_not_fetched_by_the_next_try(source: Pieces, tmp_path: Path) -> None:
    for _ in range(2):
        assert [answer.data for answer in download(source, tmp_path).get(RANGES[:2], keeps=1)]
    assert source.sent == 2000 + 2000 + 2000


def test_bytes_of_one_range_are_never_taken_for_another(source: Pieces, tmp_path: Path) -> None:
    source.breaks_after, source.error_then = 1500, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        list(download(source, tmp_path).get(RANGES[:1]))
    source.breaks_after = None
    other = Range(name=NAME, offset=1, length=2000)
    assert [(one.data, one.is_resumed) for one in download(source, tmp_path).get([other, RANGES[0]])] == [
        (DATA[1:2001], False),
        (DATA[:2000], True),
    ]


# --- whole releases ---


def break_off(world: World, version: str, folder: Path, after: int, *known: tuple[object, Path]) -> Pieces:
    """An assembly that ends in the middle of a payload, for good."""
    source = Pieces(world.store)
    source.breaks_after, source.error_then = after, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        assemble(world, release(world, version), folder, *known, source=source)  # type: ignore[arg-type]
    source.breaks_after = None
    return source


def test_the_next_assembly_goes_on_inside_the_slab(world: World, tmp_path: Path) -> None:
    three(world)
    known, one, out = installed(world, tmp_path, "2"), release(world, "3"), tmp_path / "out"
    whole = Pieces(world.store)
    assemble(world, one, tmp_path / "whole", *known, source=whole)
    source = break_off(world, "3", out, whole.sent - 1000, *known)
    result = assemble(world, one, out, *known, source=source)
    assert source.sent == whole.sent  # the index has not come again either
    assert verify_files(one, out) is None
    assert (result.fallbacks, "full" in result.bytes_by_form) == (0, False)
    assert not (out / PARTIALS).exists()


def _size(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.parametrize("what", ["payload", "index"])
def test_wrong_bytes_on_the_disk_cost_that_range_once_and_no_full(world: World, tmp_path: Path, what: str) -> None:
    three(world)
    known, one, out = installed(world, tmp_path, "2"), release(world, "3"), tmp_path / "out"
    whole = Pieces(world.store)
    assemble(world, one, tmp_path / "whole", *known, source=whole)
    index = world.store.index(one.manifest.digest(), known[0][0].manifest.digest()) or b""
    source = break_off(world, "3", out, whole.sent - 1000, *known)
    kept = {path.read_bytes() == index: path for path in sorted((out / PARTIALS).iterdir(), key=_size)}
    path = kept[what == "index"]
    damage(path, _size(path) // 2)
    result = assemble(world, one, out, *known, source=source)
    assert verify_files(one, out) is None
    assert (result.fallbacks, "full" in result.bytes_by_form) == (0, False)
    payload = max(each.length for each in source.fetched)
    assert whole.sent < source.sent <= whole.sent + (len(index) if what == "index" else payload)


def test_a_payload_that_is_wrong_in_the_store_costs_its_full_also_after_a_break(world: World, tmp_path: Path) -> None:
    three(world)
    known, one, out = installed(world, tmp_path, "2"), release(world, "3"), tmp_path / "out"
    for path in packs(world):
        path.write_bytes(bytes(path.stat().st_size))
    source = Pieces(world.store)
    source.breaks_after = 9000
    result = assemble(world, one, out, *known, source=source)
    assert verify_files(one, out) is None
    assert (result.fetched, result.fallbacks) == (2, 2)
    assert result.breaks > 0


def test_rollout_case_2_a_cancelled_assembly_stops_between_pieces_and_keeps_what_came(
    world: World, tmp_path: Path
) -> None:
    world.publish(weights())
    one, out, source = release(world), tmp_path / "out", Pieces(world.store)
    result = Fetched()

    def cancelled() -> bool:
        return source.sent >= 20 * PIECE

    with pytest.raises(FetchCancelled):
        Assembly(one, out, LocalSlabs(()), cancelled=cancelled).run(source, result)
    assert source.sent <= 21 * PIECE
    again = Pieces(world.store)
    assemble(world, one, out, source=again)
    whole = Pieces(world.store)
    assemble(world, one, tmp_path / "whole", source=whole)
    assert source.sent + again.sent == whole.sent


def test_an_assembly_that_is_cancelled_before_it_begins_asks_for_nothing(world: World, tmp_path: Path) -> None:
    world.publish(weights())
    source = Pieces(world.store)
    with pytest.raises(FetchCancelled):
        Assembly(release(world), tmp_path / "out", LocalSlabs(()), cancelled=lambda: True).run(source, Fetched())
    assert source.sent == 0


# --- one writer ---


def test_rollout_case_3_a_release_has_one_writer_and_the_other_is_told_who(world: World, tmp_path: Path) -> None:
    world.publish(weights())
    one = release(world)

    class Nested(Pieces):
        def stream(self, ranges: Sequence[Range], *, cancelled: Callable[[], bool] = never) -> Iterator[Part]:
            with pytest.raises(FetchError, match=rf"process {os.getpid()} is putting it together") as caught:
                assemble(world, one, tmp_path / "out")
            assert not caught.value.is_permanent
            return super().stream(ranges, cancelled=cancelled)

    assemble(world, one, tmp_path / "out", source=Nested(world.store))
    assert verify_files(one, tmp_path / "out") is None
    assert not list(tmp_path.glob("*.lock"))


KILLED = """
import os, signal, sys
from pathlib import Path
from sync.agent.fetch import Assembly, Fetched
from sync.agent.journal import Release
from sync.agent.local import LocalSlabs
from sync.release import parse_manifest
from sync.store import Store
from tests.sync.agent.test_download import Pieces

store, out, manifest, after = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
class Killing(Pieces):
    def stream(self, ranges, **options):
        for part in super().stream(ranges, **options):
            if self.sent > after:
                os.kill(os.getpid(), signal.SIGKILL)
            yield part
one = Release(manifest=parse_manifest(manifest.read_bytes(), "digits/1"), variant="full", engine="onnxruntime")
Assembly(one, out, LocalSlabs(())).run(Killing(Store(store)), Fetched())
"""


def test_after_kill_9_the_next_process_goes_on_at_the_byte(world: World, tmp_path: Path) -> None:
    world.publish(weights())
    one, out, after = release(world), tmp_path / "out", 40_000
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(to_bytes(one.manifest))
    command = [sys.executable, "-c", KILLED, str(world.store.root), str(out), str(manifest), str(after)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    assert list(tmp_path.glob("*.lock"))  # nobody's: it went with the process
    source, whole = Pieces(world.store), Pieces(world.store)
    assemble(world, one, out, source=source)
    assemble(world, one, tmp_path / "whole", source=whole)
    assert verify_files(one, out) is None
    assert 0 <= source.sent - (whole.sent - after) <= PIECE
    assert not list(tmp_path.glob("*.lock"))
