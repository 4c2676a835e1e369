from __future__ import annotations

import asyncio
import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from common.errors import ConfigError, FetchError, IdentityRefused
from sync.pki.authority import Authority
from sync.pki.certificates import Facts, new_key, new_request
from sync.pki.channel import CertifiedDialer
from sync.pki.identity import Identity, Pending, is_due, keep_renewed, retry_s
from tests.sync.fakes import FakeClock
from tests.sync.pki.devices import enrolled
from tests.sync.test_hints import beside, eventually

NOW = datetime(2026, 7, 1, 12, 0, tzinfo=UTC)


def facts(issued: datetime, life: timedelta) -> Facts:
    return Facts(name="a", group="g", serial="1", begins=issued - timedelta(hours=1), ends=issued + life)


def test_a_certificate_is_due_at_two_thirds_of_its_life() -> None:
    week = facts(NOW, timedelta(days=9))
    assert not is_due(week, NOW + timedelta(days=6, seconds=-1))
    assert is_due(week, NOW + timedelta(days=6))


def test_retries_grow_to_an_hour_and_leave_ten_before_the_end() -> None:
    assert [retry_s(failures, 7 * 86_400.0) for failures in (1, 2, 3, 8, 9, 10, 1000)] == [
        10,
        20,
        40,
        1280,
        2560,
        3600,
        3600,
    ]
    assert retry_s(9, 3000.0) == 300
    assert retry_s(9, -5.0) == 10


def test_a_new_identity_is_seen_by_whoever_uses_the_folder(authority: Authority, tmp_path: Path) -> None:
    one = enrolled(authority, tmp_path / "edge-a", "edge-a")
    first = one.current()
    assert one.current() is first
    enrolled(authority, tmp_path / "edge-a", "edge-a")  # again, by another process
    second = one.current()
    assert second.facts.serial != first.facts.serial
    (tmp_path / "edge-a" / "identity.pem").write_bytes(b"damaged")
    assert one.current() is second  # what was good is good
    with pytest.raises(IdentityRefused):
        Identity(tmp_path / "edge-a").current()


def test_what_does_not_belong_to_the_key_never_replaces_the_identity(authority: Authority, tmp_path: Path) -> None:
    one = enrolled(authority, tmp_path / "edge-a", "edge-a")
    before = (tmp_path / "edge-a" / "identity.pem").read_bytes()
    shown = one.current().pem
    key, other = new_key(), Authority.create(tmp_path / "other")
    for_other_key = authority.renew(new_request(new_key(), "edge-a"), shown)
    foreign = other.enrol(new_request(key, "edge-a"), other.new_token("edge-a"))
    other_name = authority.enrol(new_request(key, "edge-b"), authority.new_token("edge-b"))
    for certificate in (for_other_key, foreign, other_name, b"", b"-----BEGIN CERTIFICATE-----"):
        with pytest.raises(IdentityRefused):
            one.store(key, certificate)
    assert (tmp_path / "edge-a" / "identity.pem").read_bytes() == before


def test_a_new_identity_is_on_the_disk_before_it_takes_the_place_of_the_old_one(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, key = enrolled(authority, tmp_path / "edge-a", "edge-a"), new_key()
    made = authority.renew(new_request(key, "edge-a"), one.current().pem)
    done: list[str] = []
    replace = os.replace

    def replacing(source: Path, target: Path) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr("os.fsync", lambda fd: done.append(Path(f"/proc/self/fd/{fd}").resolve().name[:5]))
    monkeypatch.setattr("os.replace", replacing)
    one.store(key, made)
    assert done == [".tmp-", "rename", "edge-"]  # the file, its name, the folder


def test_an_enrolment_that_was_cut_off_goes_on_with_the_same_key(authority: Authority, tmp_path: Path) -> None:
    token = authority.new_token("edge-a")
    lost = Pending(tmp_path / "id", "edge-a", authority.root)
    authority.enrol(lost.request(), token)  # the answer never came
    again = Pending(tmp_path / "id", "edge-a", authority.root)
    assert again.finish(authority.enrol(again.request(), token)).name == "edge-a"
    assert Identity(tmp_path / "id").current().facts.name == "edge-a"


def test_a_node_that_is_not_enrolled_yet_fails_to_fetch_and_works_after_it(
    authority: Authority, tmp_path: Path
) -> None:
    identity = Identity(tmp_path / "edge-a")
    dialer = CertifiedDialer(identity)
    assert not dialer.is_stale()
    with pytest.raises(FetchError, match="outrider sync enrol"):
        dialer.connect("127.0.0.1:9", ())
    with pytest.raises(ConfigError):
        identity.tls()
    enrolled(authority, tmp_path / "edge-a", "edge-a")
    dialer.connect("127.0.0.1:9", ()).close()
    assert not dialer.is_stale()
    enrolled(authority, tmp_path / "edge-a", "edge-a")
    assert dialer.is_stale()


async def test_renewal_comes_in_time_and_is_tried_again_and_no_secret_is_logged(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sync.pki.identity._LOOK_S", 0.005)
    caplog.set_level(logging.DEBUG)
    clock, calls, is_away = FakeClock(), list[str](), True
    one = enrolled(authority, tmp_path / "edge-a", "edge-a")
    first = one.current()

    def renew(identity: Identity) -> Facts:
        calls.append(identity.current().facts.serial)
        if is_away:
            raise FetchError("certificate", "nobody there")
        key = new_key()
        shown = identity.current()
        return identity.store(
            key, Authority(authority.folder, clock=clock).renew(new_request(key, "edge-a"), shown.pem)
        )

    async with beside(keep_renewed(one, renew, clock=clock)):
        await asyncio.sleep(0.05)
        assert calls == []
        clock.advance(days=4, hours=17)  # 2/3 of 7 days is 4 days 16 hours
        assert await eventually(lambda: len(calls) == 1)
        await asyncio.sleep(0.05)
        assert len(calls) == 1  # not again at once
        is_away = False
        clock.advance(seconds=11)
        assert await eventually(lambda: one.current().facts.serial != first.facts.serial)
        await asyncio.sleep(0.05)
        assert calls == [first.facts.serial] * 2
    assert "nobody there" in caplog.text
    assert "PRIVATE" not in caplog.text


async def test_a_renewal_that_is_late_by_a_clock_that_stepped_still_comes(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sync.pki.identity._LOOK_S", 0.005)
    clock = FakeClock(datetime(1970, 1, 1, tzinfo=UTC))
    one, calls = enrolled(authority, tmp_path / "edge-a", "edge-a"), list[int]()

    def renew(identity: Identity) -> Facts:
        calls.append(1)
        return identity.current().facts

    async with beside(keep_renewed(one, renew, clock=clock)):
        await asyncio.sleep(0.03)
        assert calls == []
        clock.wall = one.current().facts.ends - timedelta(
            minutes=1
        )  # the time came from a server; no second has passed
        assert await eventually(lambda: calls != [])
