"""Runs programs as child processes: restarts a dead one with backoff, stops all in order.

Knows nothing of what they are. A child has a session of its own, so that Ctrl-C reaches the supervisor alone, which
then stops them in order; the kernel ends the children if the supervisor itself is killed. Their logs are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.up.bounded import MAX_LOG_BYTES, bound

_PR_SET_PDEATHSIG = 1
_LOOK_S = 5.0  # between looks at the size of the logs
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One child. Its output is appended to `log`; `stop_s` bounds its way from SIGTERM to its end. Higher ranks lean on
    lower ones: they stop first, equal ones together."""

    name: str
    argv: tuple[str, ...]
    log: Path
    rank: int = 0
    stop_s: float = 30.0  # a node: 10 to drain, 10 for its agent, 5 for its device


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Seconds before a restart: doubled at each death in a row, back to `first_s` after `settled_s` of life."""

    first_s: float = 0.25
    longest_s: float = 15.0
    settled_s: float = 30.0

    def after(self, deaths: int) -> float:
        return min(self.longest_s, self.first_s * 2.0 ** min(deaths - 1, 16))


class Supervisor:
    """An async context; leaving it stops every child. `on_note` gets a line for each death and restart."""

    def __init__(
        self,
        *,
        backoff: Backoff | None = None,
        on_note: Callable[[str], None] = lambda _line: None,
        max_log_bytes: int = MAX_LOG_BYTES,
    ) -> None:
        self._backoff, self._max_log_bytes = backoff or Backoff(), max_log_bytes
        self._note = on_note
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: dict[str, tuple[Program, asyncio.Task[None]]] = {}
        self.restarts: dict[str, int] = {}

    async def __aenter__(self) -> Supervisor:
        self._bounding = asyncio.create_task(self._bound_logs(), name="bound-logs")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._bounding.cancel()
        ranks: dict[int, list[str]] = {}
        for name, kept in self._keepers.items():
            ranks.setdefault(kept[0].rank, []).append(name)
        for rank in sorted(ranks, reverse=True):
            await asyncio.gather(*(self.stop(name) for name in ranks[rank]))

    async def start(self, program: Program) -> None:
        """Starts a child and keeps it alive from now on. Raises `OSError` when it cannot be started at all."""
        if program.name in self._keepers:
            raise ValueError(f"{program.name} runs already")
        child = await self._spawn(program)
        keeper = asyncio.create_task(self._keep(program, child), name=f"keep-{program.name}")
        self._keepers[program.name] = (program, keeper)

    async def stop(self, name: str) -> None:
        """Ends a child for good: SIGTERM, then SIGKILL after its bound. Does nothing for one that was not started."""
        if name not in self._keepers:
            return
        program, keeper = self._keepers[name]
        keeper.cancel()
        await asyncio.wait((keeper,))
        await self._end(program, self._children[name])
        del self._keepers[name]

    async def _end(self, program: Program, child: asyncio.subprocess.Process) -> None:
        if child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(program.stop_s):
                await child.wait()
        except TimeoutError:
            self._note(f"{program.name} did not end within {program.stop_s:.0f} s of SIGTERM and is killed")
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    def pid(self, name: str) -> int | None:
        child = self._children.get(name)
        return child.pid if child is not None and child.returncode is None else None

    async def _keep(self, program: Program, child: asyncio.subprocess.Process) -> None:
        loop = asyncio.get_running_loop()
        deaths = 0
        while True:
            born = loop.time()
            code = await child.wait()
            deaths = 1 if loop.time() - born >= self._backoff.settled_s else deaths + 1
            delay = self._backoff.after(deaths)
            self._note(f"{program.name} ended with {_describe(code)}, again in {delay:.1f} s; its log: {program.log}")
            await asyncio.sleep(delay)
            self.restarts[program.name] = self.restarts.get(program.name, 0) + 1
            try:
                child = await self._spawn(program)
            except Exception as exc:  # no memory, no descriptors, no threads: whatever it is, it is tried again
                self._note(f"{program.name} cannot be started: {exc or type(exc).__name__}")

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for program, _ in list(self._keepers.values()):
                try:
                    await asyncio.to_thread(bound, program.log, self._max_log_bytes)
                except OSError as exc:
                    self._note(f"{program.log} cannot be cut off: {exc}")

    async def _spawn(self, program: Program) -> asyncio.subprocess.Process:
        program.log.parent.mkdir(parents=True, exist_ok=True)
        with program.log.open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                *program.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent(),
            )
        self._children[program.name] = child
        return child


def end_with_parent() -> Callable[[], None]:
    """To run in a child before exec: the kernel kills it when this process is gone.

    SIGKILL, since nothing is left to bound a slow end: whoever starts the next system at once finds ports and folders
    free. Every process has to bear it anyway.
    """
    parent = os.getpid()

    def arrange() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone already
            os._exit(1)

    return arrange


def _describe(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"
