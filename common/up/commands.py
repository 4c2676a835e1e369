"""Runs `outrider` subcommands to their end: how `up` builds and publishes without importing who does it."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable

from common.errors import OutriderError
from common.up.supervisor import end_with_parent

OUTRIDER = (sys.executable, "-m", "common.cli")
_TAIL = 15
_STOP_S = 10.0


class CommandFailed(OutriderError):
    """A subcommand ended with another code than 0. `lines` is the end of what it said."""

    def __init__(self, command: tuple[str, ...], code: int, lines: list[str]) -> None:
        self.command, self.code, self.lines = command, code, lines
        super().__init__(
            f"outrider {' '.join(command)} ended with {code}:\n" + "\n".join(f"  {line}" for line in lines)
        )


async def outrider(*command: str, say: Callable[[str], None]) -> str:
    """Runs one subcommand; `say` gets each line of its stderr, the answer is its stdout. Raises `CommandFailed`.

    Cancelled, it ends the subcommand and waits for that.
    """
    child = await asyncio.create_subprocess_exec(
        *OUTRIDER,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=end_with_parent(),
        limit=1 << 20,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    tail: deque[str] = deque(maxlen=_TAIL)
    output = asyncio.create_task(child.stdout.read())
    try:
        async for line in child.stderr:
            text = line.decode(errors="replace").rstrip()
            tail.append(text)
            say(text)
        code = await child.wait()
    finally:
        if child.returncode is None:
            await _end(child)
    stdout = (await output).decode(errors="replace")
    if code != 0:
        raise CommandFailed(command, code, list(tail))
    return stdout


async def _end(child: asyncio.subprocess.Process) -> None:
    child.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()
