"""The agent's events as metrics and log lines of the process that it runs in."""

from __future__ import annotations

import logging

from common.telemetry.logs import EventLog, log
from common.telemetry.metrics import Metrics
from sync.events import Installed, PollDone, Quarantined, SlabsFetched, SyncFailed


def measure_sync(metrics: Metrics) -> None:
    polls = metrics.counter("outrider_sync_polls_total", "Polls of the sync service.", ("result",))
    what = "Payloads, whole slabs, table sets, indexes: bytes received."
    payload = metrics.counter("outrider_sync_fetched_bytes_total", what, ("model", "form"))
    fetched = metrics.counter("outrider_sync_slabs_fetched_total", "Slabs fetched.", ("model",))
    reused = metrics.counter("outrider_sync_slabs_reused_total", "Slabs found on this machine.", ("model",))
    fallbacks = metrics.counter("outrider_sync_full_fallbacks_total", "Slabs whose delta was no good.", ("model",))
    refused = metrics.counter("outrider_sync_quarantined_total", "Releases refused for good.", ("model",))
    installs = metrics.counter("outrider_sync_installs_total", "Versions brought into service.", ("model", "source"))
    failures = metrics.counter("outrider_sync_failures_total", "Rounds that will be tried again.", ("model",))
    version = metrics.gauge("outrider_sync_active_version", "The version that was installed last.", ("model",))

    def slabs_fetched(event: SlabsFetched) -> None:
        for form, size in event.bytes_by_form.items():
            payload(size, event.model, form)
        fetched(event.fetched, event.model)
        reused(event.reused, event.model)
        fallbacks(event.fallbacks, event.model)

    def installed(event: Installed) -> None:
        installs(1, event.model, "disk" if event.was_restored else "service")
        version(float(event.version), event.model)

    metrics.register(PollDone, lambda event: polls(1, "error" if event.error else "ok"))
    metrics.register(SlabsFetched, slabs_fetched)
    metrics.register(Installed, installed)
    metrics.register(Quarantined, lambda event: refused(1, event.model))
    metrics.register(SyncFailed, lambda event: failures(1, event.model))


def log_sync(events: EventLog) -> None:
    events.register(
        SlabsFetched,
        lambda e: log(
            "slabs fetched",
            model=e.model,
            version=e.version,
            bytes=sum(e.bytes_by_form.values()),
            fetched=e.fetched,
            reused=e.reused,
            fallbacks=e.fallbacks,
            seconds=round(e.seconds, 3),
        ),
    )
    events.register(
        Installed,
        lambda e: log("version serves", model=e.model, version=e.version, restored=e.was_restored),
    )
    events.register(
        Quarantined,
        lambda e: log("release refused", logging.ERROR, model=e.model, version=e.version, reason=e.reason),
    )
    events.register(
        SyncFailed,
        lambda e: events.limited("sync failed", logging.WARNING, key=(e.model,), model=e.model, error=e.error),
    )
    events.register(
        PollDone,
        lambda e: events.limited("poll failed", logging.WARNING, error=e.error) if e.error else None,
    )
