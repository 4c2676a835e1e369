"""The agent as a whole: from the signed desired state to files, gate and swap; and what goes wrong on the way."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.clock import SystemClock
from common.errors import BuildError, EngineError, EngineUnavailable, FetchError, StoreBusy
from sync.agent import Agent, failpoints
from sync.agent.client import GrpcSource
from sync.agent.peer_service import peer_service
from sync.agent.steps import MAX_ATTEMPTS
from sync.events import Event, Installed, PollDone, Quarantined, SlabsFetched, StateChanged, SyncFailed
from sync.hints import Hint
from sync.release import to_bytes
from sync.service import ServiceConfig
from sync.trust.repository import Repository
from tests.sync.fakes import FakeInstaller, Killed, World, running, trained, weights


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def only(agent: Agent):  # type: ignore[no-untyped-def]
    (status,) = agent.status()
    return status


def restarted(world: World, installer: FakeInstaller) -> Agent:
    agent = world.agent(installer)
    agent.restore()
    return agent


# --- the straight way ---


def test_a_published_folder_arrives_through_the_service_as_it_was(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    with (
        running(ServiceConfig(store=str(world.store.root))) as address,
        world.agent(installer, source=GrpcSource(address, timeout_s=10)) as agent,
    ):
        assert agent.run_once()
        assert only(agent).state == "COMMITTED"
    published = files(world.folder / "bundle")
    arrived = files(world.folder / "node/models/digits/1")
    assert set(arrived) == {"bundle.json", "golden.safetensors", "labels.txt", "cpu-int8/model.safetensors"}
    assert arrived == {name: published[name] for name in arrived}
    assert installer.serving == {"digits": "1"}
    assert [name for name, _ in installer.calls] == ["prepare", "gate", "activate"]


def test_only_changed_slabs_are_fetched_and_as_deltas(world: World, installer: FakeInstaller) -> None:
    installer.variants = ("full",)
    world.publish(weights())
    agent = world.agent(installer)
    agent.run_once()
    first = world.events_of(SlabsFetched)[-1]
    world.publish(trained(weights(), "fc.weight"))
    world.source.fetched.clear()
    agent.run_once()
    second = world.events_of(SlabsFetched)[-1]
    assert installer.serving == {"digits": "2"}
    assert second.fetched == 1
    assert set(first.bytes_by_form) == {"full"}
    assert "index" in second.bytes_by_form
    assert "full" not in second.bytes_by_form
    assert sum(second.bytes_by_form.values()) < sum(first.bytes_by_form.values()) / 2
    counters = only(agent).counters
    assert counters["bytes_full"] == first.bytes_by_form["full"]
    assert {f"bytes_{form}": size for form, size in second.bytes_by_form.items()}.items() <= counters.items()
    assert counters["slabs_reused"] == second.reused
    agent.close()


def test_active_and_previous_are_kept_and_older_ones_removed(world: World, installer: FakeInstaller) -> None:
    agent = world.agent(installer)
    for seed in range(4):
        world.publish(weights(seed))
        agent.run_once()
    folder = world.folder / "node/models/digits"
    assert {path.name for path in folder.iterdir()} == {"3", "4"}
    assert (only(agent).active, only(agent).previous) == ("4", "3")
    agent.close()


def test_rollout_case_26_fifty_updates_in_a_row_all_arrive(world: World, installer: FakeInstaller) -> None:
    agent, current = world.agent(installer), weights(rows=8)
    for version in range(1, 51):
        world.publish(current)
        assert agent.run_once()
        assert installer.serving == {"digits": str(version)}
        current = trained(current, "fc.bias", "fc.weight", seed=version)
    assert len(list((world.folder / "node/models/digits").iterdir())) == 2
    assert len(list((world.folder / "node/tuf/targets").iterdir())) == 2
    agent.close()


def test_polling_again_does_nothing(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    agent = world.agent(installer)
    agent.run_once()
    calls = list(installer.calls)
    world.source.fetched.clear()
    assert agent.run_once()
    assert installer.calls == calls
    assert world.source.fetched == []
    agent.close()


def test_two_models_and_a_node_that_wants_one_of_them(world: World, installer: FakeInstaller) -> None:
    world.publish(weights(0), model="a")
    world.publish(weights(1), model="b")
    everything, one = FakeInstaller(), FakeInstaller()
    with world.agent(everything, "all") as first, world.agent(one, "one", models=("b", "absent")) as second:
        assert first.run_once()
        assert second.run_once()
        assert {status.model: status.state for status in second.status()} == {"b": "COMMITTED", "absent": "IDLE"}
    assert everything.serving == {"a": "1", "b": "1"}
    assert one.serving == {"b": "1"}


def test_the_first_variant_that_the_node_can_run_is_taken(world: World) -> None:
    world.publish(weights())
    worker = FakeInstaller(variants=("full",))
    with world.agent(worker, engines=("torch", "onnxruntime")) as agent:
        agent.run_once()
    assert set(files(world.folder / "node/models/digits/1")) >= {"full/model.safetensors"}
    assert not (world.folder / "node/models/digits/1/cpu-int8").exists()


def test_a_node_that_can_run_no_variant_fetches_nothing_and_says_why(world: World) -> None:
    world.publish(weights())
    with world.agent(FakeInstaller(variants=())) as agent:
        assert agent.run_once()
        assert agent.run_once()
        assert "cannot run here" in only(agent).reason
    assert world.source.fetched == []
    assert len(world.events_of(SyncFailed)) == 1


# --- what goes wrong with slabs ---


def corrupt(world: World, pattern: str) -> int:
    paths = list(world.store.root.glob(f"objects/*/{pattern}"))
    for path in paths:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    return len(paths)


def test_a_corrupt_difference_costs_the_full_of_that_slab_alone(world: World, installer: FakeInstaller) -> None:
    installer.variants = ("full",)
    world.publish(weights())
    agent = world.agent(installer)
    agent.run_once()
    world.publish(trained(weights(), "conv.weight", "fc.weight", seed=3))
    seen = list[str]()

    def one_is_corrupt(name: str, data: bytes) -> bytes:
        if not name.endswith(".pack") or len(data) < 1000:
            return data
        seen.append(name)
        return data[:-1] + bytes([data[-1] ^ 1]) if len(seen) == 1 else data

    world.source.tamper = one_is_corrupt
    world.source.fetched.clear()
    assert agent.run_once()
    fetched = world.events_of(SlabsFetched)[-1]
    assert (fetched.fetched, fetched.fallbacks) == (2, 1)
    assert len([one for one in world.source.fetched if one.name.endswith(".full")]) == 1
    assert installer.serving == {"digits": "2"}
    assert only(agent).counters["fallbacks"] == 1
    agent.close()


def test_a_corrupt_full_is_an_error_and_the_old_version_serves_until_it_is_healed(
    world: World, installer: FakeInstaller
) -> None:
    world.publish(weights())
    agent = world.agent(installer)
    agent.run_once()
    world.publish(weights(5))
    saved = world.folder / "saved"
    shutil.copytree(world.store.root / "objects", saved)
    corrupt(world, "*")
    assert not agent.run_once()
    assert "corrupt" in only(agent).reason
    assert (only(agent).state, installer.serving) == ("FETCHING", {"digits": "1"})
    shutil.copytree(saved, world.store.root / "objects", dirs_exist_ok=True)
    assert agent.run_once()
    assert installer.serving == {"digits": "2"}
    agent.close()


def test_an_interrupted_fetch_goes_on_where_it_was(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())

    def cut(name: str, data: bytes) -> bytes:
        if len(world.source.fetched) >= 4:
            raise FetchError(name, "connection reset")
        return data

    world.source.tamper = cut
    agent = world.agent(installer)
    assert not agent.run_once()
    agent.close()
    done = [one.name for one in world.source.fetched][:3]
    world.source.fetched.clear()
    world.source.tamper = lambda name, data: data
    agent = restarted(world, installer)
    assert agent.run_once()
    assert not {one.name for one in world.source.fetched} & set(done)
    assert only(agent).counters["slabs_fetched"] == len(done) + len(world.source.fetched)
    agent.close()


def test_rollout_case_25_a_difference_is_only_asked_for_to_a_base_proven_on_the_disk(
    world: World, installer: FakeInstaller
) -> None:
    world.publish(weights())
    agent = world.agent(installer)
    agent.run_once()
    path = world.folder / "node/models/digits/1/cpu-int8/model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    world.publish(trained(weights(), seed=4))
    world.source.fetched.clear()
    assert agent.run_once()
    assert world.source.fetched
    assert {Path(one.name).suffix for one in world.source.fetched} == {".full"}
    assert installer.serving == {"digits": "2"}
    agent.close()


# --- refused releases ---


def test_a_release_that_fails_the_gate_is_refused_once_and_for_all(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    agent = world.agent(installer)
    agent.run_once()
    installer.bad = {"2"}
    world.publish(weights(6))
    assert agent.run_once()
    assert (only(agent).state, only(agent).active, installer.serving) == ("QUARANTINED", "1", {"digits": "1"})
    assert "golden gate: loss 0.9" in only(agent).reason
    assert installer.discarded == ["2"]
    assert not (world.folder / "node/models/digits/2").exists()
    world.source.fetched.clear()
    calls = list(installer.calls)
    agent.run_once()
    agent.close()
    agent = restarted(world, installer)
    agent.run_once()
    assert world.source.fetched == []
    assert installer.calls[len(calls) :] == [("prepare", "1"), ("activate", "1")]
    assert len(world.events_of(Quarantined)) == 1
    agent.close()


def test_rollout_case_20_refused_content_stays_refused_under_a_new_version(
    world: World, installer: FakeInstaller
) -> None:
    world.publish(weights())
    agent = world.agent(installer)
    agent.run_once()
    installer.bad = {"2"}
    world.publish(weights(6))
    agent.run_once()
    world.publish(weights(6), force=True)
    world.source.fetched.clear()
    agent.run_once()
    assert (only(agent).state, only(agent).version) == ("QUARANTINED", "3")
    assert world.source.fetched == []
    agent.close()


def test_a_newer_version_supersedes_a_refused_one_as_a_delta_to_what_serves(
    world: World, installer: FakeInstaller
) -> None:
    world.publish(weights())
    agent = world.agent(installer)
    agent.run_once()
    installer.bad = {"2"}
    world.publish(trained(weights(), "fc.weight", seed=7))
    agent.run_once()
    world.publish(trained(weights(), "fc.weight", seed=8))
    agent.run_once()
    assert installer.serving == {"digits": "3"}
    assert "full" not in world.events_of(SlabsFetched)[-1].bytes_by_form
    agent.close()


@pytest.mark.parametrize("step", ["prepare", "gate"])
@pytest.mark.parametrize("error", [EngineError("digits", "no such operator"), BuildError("bad graph")])
def test_a_release_that_cannot_be_built_is_quarantined(
    world: World, installer: FakeInstaller, step: str, error: Exception
) -> None:
    installer.fail[step] = error
    world.publish(weights())
    with world.agent(installer) as agent:
        assert agent.run_once()
        assert (only(agent).state, only(agent).active) == ("CLOUD_ONLY", None)
        assert str(error) in only(agent).reason


def test_rollout_case_20_a_node_that_is_not_ready_waits_without_blaming_the_release(
    world: World, installer: FakeInstaller
) -> None:
    installer.fail["prepare"] = EngineUnavailable("onnxruntime", "device busy")
    world.publish(weights())
    with world.agent(installer) as agent:
        for _ in range(MAX_ATTEMPTS + 2):
            assert not agent.run_once()
        assert (only(agent).state, only(agent).code) == ("WAITING", "NOT_READY")
        installer.fail.clear()
        assert agent.run_once()
    assert installer.serving == {"digits": "1"}


def test_a_build_that_keeps_failing_is_given_up(world: World, installer: FakeInstaller) -> None:
    installer.fail["activate"] = MemoryError("no room")
    world.publish(weights())
    with world.agent(installer) as agent:
        for _ in range(MAX_ATTEMPTS):
            assert not agent.run_once()
        assert agent.run_once()
        assert only(agent).state == "CLOUD_ONLY"
        assert "no room" in only(agent).reason
    assert len(world.source.fetched) == len(set(world.source.fetched))


def test_a_build_that_takes_the_process_down_is_given_up(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    installer.fail["prepare"] = Killed()
    for _ in range(MAX_ATTEMPTS):
        agent = restarted(world, installer)
        with pytest.raises(Killed):
            agent.run_once()
        agent.close()
    with restarted(world, installer) as agent:
        assert agent.run_once()
        assert only(agent).state == "CLOUD_ONLY"


# --- restarts ---


def test_a_restart_serves_from_the_disk_and_fetches_nothing(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    with world.agent(installer) as agent:
        agent.run_once()
    world.source.error = FetchError("everything", "no network")
    again = FakeInstaller()
    with world.agent(again) as agent:
        agent.restore()
        assert again.serving == {"digits": "1"}
        assert world.events_of(Installed)[-1].was_restored
        assert not agent.run_once()
        world.source.error = None
        world.source.fetched.clear()
        assert agent.run_once()
    assert world.source.fetched == []
    assert again.calls == [("prepare", "1"), ("activate", "1")]


@pytest.mark.parametrize("state", ["ADMITTED", "FETCHING", "STAGED", "BUILDING", "GATED", "PROBATION", "COMMITTED"])
def test_a_crash_right_after_any_state_is_survived(world: World, installer: FakeInstaller, state: str) -> None:
    world.publish(weights())
    with world.agent(installer) as agent:
        agent.run_once()
    world.publish(trained(weights(), "fc.weight"))
    agent = world.agent(installer, on_event=dies_when(lambda e: isinstance(e, StateChanged) and e.new == state))
    agent.restore()
    with pytest.raises(Killed):
        agent.run_once()
    agent.close()
    check_recovery(world, FakeInstaller(), has_new=state in ("PROBATION", "COMMITTED"))


@pytest.mark.parametrize("step", ["prepare", "gate", "activate"])
def test_a_crash_inside_the_installer_is_survived(world: World, installer: FakeInstaller, step: str) -> None:
    world.publish(weights())
    with world.agent(installer) as agent:
        agent.run_once()
        world.publish(trained(weights(), "fc.weight"))
        installer.fail[step] = Killed()
        with pytest.raises(Killed):
            agent.run_once()
    check_recovery(world, FakeInstaller(), has_new=False)


ON_THE_WAY = [name for name in failpoints.NAMES if name not in ("rolling back", "reverted")]  # test_watch.py has those


@pytest.mark.parametrize("place", ON_THE_WAY)
def test_a_crash_at_any_failpoint_is_survived(world: World, installer: FakeInstaller, place: str) -> None:
    world.publish(weights())
    with world.agent(installer) as agent:
        agent.run_once()
    world.publish(trained(weights(), "fc.weight"))
    reached = []

    def dies(name: str) -> None:
        reached.append(name)
        if name == place:
            raise Killed

    agent = restarted(world, installer)
    with failpoints.stopping(dies), pytest.raises(Killed):
        agent.run_once()
    agent.close()
    has_new = place in ("on probation", "committed")
    check_recovery(world, FakeInstaller(), has_new=has_new)
    assert list(dict.fromkeys(reached)) == ON_THE_WAY[: ON_THE_WAY.index(place) + 1]  # each place is where it is said


@pytest.mark.parametrize("at", range(8))
def test_a_crash_at_any_fsync_is_survived(
    world: World, installer: FakeInstaller, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(weights())
    with world.agent(installer) as agent:
        agent.run_once()
        world.publish(trained(weights(), "fc.weight"))
        left = [at]

        def fsync(fd: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", fsync)
            try:
                agent.run_once()
            except Killed:
                assert installer.serving == {"digits": "1"}
    check_recovery(world, FakeInstaller(), has_new=None)


def dies_when(is_time: Callable[[Event], bool]) -> Callable[[Event], None]:
    def hook(event: Event) -> None:
        if is_time(event):
            raise Killed

    return hook


def check_recovery(world: World, installer: FakeInstaller, *, has_new: bool | None) -> None:
    """After a crash: the committed version serves at once, the new one after a poll, and every file is right."""
    agent = restarted(world, installer)
    if has_new is not None:
        assert installer.serving == {"digits": "2" if has_new else "1"}
    assert agent.run_once()
    agent.look()
    assert installer.serving == {"digits": "2"}
    assert only(agent).state == "COMMITTED"
    published, arrived = files(world.folder / "bundle"), files(world.folder / "node/models/digits/2")
    assert arrived == {name: published[name] for name in arrived}
    assert list((world.folder / "node/staging/digits").iterdir()) == []
    agent.close()


def test_a_damaged_file_is_mended_by_fetching_what_is_damaged(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    with world.agent(installer) as agent:
        agent.run_once()
    path = world.folder / "node/models/digits/1/cpu-int8/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)
    world.source.fetched.clear()
    again = FakeInstaller()
    with world.agent(again) as agent:
        agent.restore()
        assert again.serving == {}
        assert "damaged" in only(agent).reason
        assert agent.run_once()
    assert again.serving == {"digits": "1"}
    assert len(world.source.fetched) == 1


def test_the_version_before_serves_while_the_active_one_is_damaged(world: World, installer: FakeInstaller) -> None:
    with world.agent(installer) as agent:
        for seed in range(2):
            world.publish(weights(seed))
            agent.run_once()
    (world.folder / "node/models/digits/2/bundle.json").unlink()
    again = FakeInstaller()
    with world.agent(again) as agent:
        agent.restore()
        assert again.serving == {"digits": "1"}
        agent.run_once()
    assert again.serving == {"digits": "2"}


def test_two_agents_cannot_share_a_folder(world: World, installer: FakeInstaller) -> None:
    with world.agent(installer), pytest.raises(StoreBusy):
        world.agent(installer)


# --- trust ---


def test_a_zeroed_metadata_folder_and_an_old_repository_are_caught_by_the_journal(
    world: World, installer: FakeInstaller
) -> None:
    world.publish(weights(0))
    shutil.copytree(world.store.root, world.folder / "old")
    world.publish(weights(1))
    agent = world.agent(installer)
    agent.run_once()
    shutil.rmtree(world.folder / "node/tuf")
    shutil.rmtree(world.store.root / "metadata")
    shutil.copytree(world.folder / "old/metadata", world.store.root / "metadata")
    assert not agent.run_once()
    assert "rollback attack refused" in (agent.last_error or "")
    assert installer.serving == {"digits": "2"}
    agent.close()


def test_an_old_desired_state_signed_anew_is_refused(world: World, installer: FakeInstaller) -> None:
    """Whoever holds the online key cannot assign an old epoch again."""
    world.publish(weights(0))
    old = world.publisher.current("digits")
    world.publish(weights(1))
    agent = world.agent(installer)
    agent.run_once()
    assert old is not None
    repository = Repository(world.store, world.keys, clock=world.clock)
    repository.add({}, {"desired/digits.json": to_bytes(old)})
    assert not agent.run_once()
    assert installer.serving == {"digits": "2"}
    repository.add({}, {"desired/digits.json": to_bytes(replace(old, epoch=3))})
    assert agent.run_once()
    assert installer.serving == {"digits": "1"}  # a revert is a higher epoch, and needs no network but metadata
    agent.close()


def test_rollout_case_8_expired_metadata_stops_new_installs_only(world: World, installer: FakeInstaller) -> None:
    world.publish(weights(0))
    with world.agent(installer) as agent:
        agent.run_once()
        world.publish(weights(1))
        world.clock.advance(days=5)
        assert not agent.run_once()
        assert "expired" in (agent.last_error or "")
    again = FakeInstaller()
    with world.agent(again) as agent:
        agent.restore()
        agent.run_once()
        assert again.serving == {"digits": "1"}
        Repository(world.store, world.keys, clock=world.clock).renew()
        assert agent.run_once()
    assert again.serving == {"digits": "2"}


def test_a_failing_model_does_not_hold_up_the_others(world: World, installer: FakeInstaller) -> None:
    world.publish(weights(0), model="a")
    world.publish(weights(1), model="b")
    ids = {model: set((world.publisher.manifest(model, "1") or pytest.fail("no manifest")).slabs()) for model in "ab"}
    world.source.tamper = lambda name, data: data[:-1] if Path(name).stem in ids["a"] - ids["b"] else data
    with world.agent(installer) as agent:
        assert not agent.run_once()
        assert {status.model: status.state for status in agent.status()} == {"a": "FETCHING", "b": "COMMITTED"}
    assert installer.serving == {"b": "1"}


def test_a_hook_that_fails_is_not_the_agents_failure(world: World, installer: FakeInstaller) -> None:
    def hook(event: Event) -> None:
        raise ZeroDivisionError

    world.publish(weights())
    with world.agent(installer, on_event=hook) as agent:
        assert agent.run_once()
    assert installer.serving == {"digits": "1"}


# --- the thread ---


def eventually(is_so: Callable[[], bool], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_the_thread_restores_polls_and_stops(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    agent = world.agent(installer, clock=SystemClock(), interval_s=0.05, min_gap_s=0.01)
    agent.start()
    assert agent.wait_restored(5)
    assert eventually(lambda: installer.serving == {"digits": "1"})
    world.publish(weights(1))  # no hint: the poll finds it
    assert eventually(lambda: installer.serving == {"digits": "2"})
    agent.stop()
    with world.agent(FakeInstaller()):
        pass  # the folder is free again


def test_a_hint_brings_the_news_before_the_interval_is_over(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    agent = world.agent(installer, clock=SystemClock(), interval_s=900.0, min_gap_s=0.01)
    agent.start()
    assert eventually(lambda: installer.serving == {"digits": "1"})
    polls = len(world.events_of(PollDone))
    agent.hint(Hint(timestamp_version=1, spread_ms=0))  # old news
    world.publish(weights(1))
    agent.hint(Hint(timestamp_version=99, spread_ms=0))
    assert eventually(lambda: installer.serving == {"digits": "2"})
    assert len(world.events_of(PollDone)) == polls + 1
    agent.stop()


def test_a_hint_of_what_is_known_is_heeded_while_something_is_left_to_do(
    world: World, installer: FakeInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service dies after its metadata is read and before its slabs are: its hint on return says nothing new."""
    world.publish(weights())
    agent = world.agent(installer, min_gap_s=0.01)
    known = Hint(timestamp_version=1, spread_ms=0)

    def gone(_wants: object) -> None:
        raise FetchError("slabs", "the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(world.source, "fetch", gone)
        assert not agent.run_once()
    assert only(agent).next_try_s >= 0.5
    agent.hint(known)
    assert only(agent).next_try_s <= 0.01
    assert agent.run_once()
    next_try_s = only(agent).next_try_s
    agent.hint(known)
    assert only(agent).next_try_s == next_try_s
    agent.close()


def test_a_node_that_was_away_takes_differences_by_way_of_a_release_between(
    world: World, installer: FakeInstaller
) -> None:
    """The last release has packs to the two before it only; this node has an older one."""
    current = weights(rows=1000)
    world.publish(current)
    with world.agent(installer) as agent:
        assert agent.run_once()
        for seed in range(3):
            current = trained(current, seed=seed)
            world.publish(current)
        assert agent.run_once()
        assert installer.serving == {"digits": "4"}
    fetched = world.events_of(SlabsFetched)[-1].bytes_by_form
    assert fetched.get("full", 0) < sum(fetched.values()) / 4


def test_slabs_of_a_node_nearby_are_taken_first(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    with world.agent(installer, "first") as first:
        assert first.run_once()
        with peer_service("127.0.0.1:0", first.installed) as address:
            world.source.fetched.clear()
            with world.agent(FakeInstaller(), "second", peers=(address,)) as second:
                assert second.run_once()
                assert world.source.fetched == []
                assert only(second).counters["bytes_peer"] > 20_000
                assert only(second).state == "COMMITTED"


@pytest.mark.parametrize("deaths", [(1,), (5,), (1, 1, 1, 1), (3, 4, 2), (11,)])
def test_what_was_written_before_a_death_is_not_fetched_again(world: World, deaths: tuple[int, ...]) -> None:
    """Each life dies when it has written so many slabs: less than a batch is fetched twice, which is at most 1,024."""
    tensors = {f"layer.{number}": np.full((512, 512), number, np.float32) for number in range(12)}  # a slab each
    world.publish(tensors)
    for slabs in deaths:
        left = [slabs]

        def die(name: str, left: list[int] = left) -> None:
            if name == "slab written":
                left[0] -= 1
                if not left[0]:
                    raise Killed

        with failpoints.stopping(die), world.agent(FakeInstaller(variants=("full",))) as agent, pytest.raises(Killed):
            agent.run_once()
    installer = FakeInstaller(variants=("full",))
    with world.agent(installer) as agent:
        assert agent.run_once()
    assert installer.serving == {"digits": "1"}
    fetched = Counter(one.name for one in world.source.fetched)
    assert len(fetched) >= 12
    assert sum(fetched.values()) - len(fetched) <= len(deaths)  # one that was on its way at each death, at most
