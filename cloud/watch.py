"""`outrider sync watch`: each interval a trainer's newest finished checkpoint becomes a release.

Composes what finds it (`sync/watch/`) with the way of `outrider publish`: build as the successor of the bundle
before, gate, release to all nodes (*direct*). It stands here because it builds, which `sync` cannot. The mode *train*
(a rollout runs to its end, the newest waits) asks for what nodes report, and comes with the rollout controller.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cloud.publish import MAX_INTERVAL_S, Release, every, spec_with

if TYPE_CHECKING:
    from sync.watch.places import Place
    from sync.watch.watch import Checkpoint, Look

_WATCHED: Final = ".watched"
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhd]?)")


def add_watch(commands: Any) -> None:
    watch = commands.add_parser("watch", help="release a trainer's newest checkpoint each interval, until stopped")
    watch.add_argument("source", metavar="SOURCE", help="where the trainer writes: a folder, or s3://bucket/prefix")
    watch.add_argument(
        "--model", type=Path, required=True, dest="spec", metavar="SPEC", help="model.toml to build with"
    )
    watch.add_argument("--store", required=True, help="the store: a folder, or s3://bucket/prefix")
    watch.add_argument("--keys", type=Path, required=True, help="folder of the signing keys")
    watch.add_argument("--every", default="15m", metavar="TIME", help="at most one release in it: 90s, 15m, 1h (15m)")
    watch.add_argument(
        "--look", default="10s", metavar="TIME", help="between two looks, over which a file stands still (10s)"
    )
    watch.add_argument("--pattern", metavar="GLOB", help="names of checkpoint files (*.safetensors, or *.onnx)")
    watch.add_argument("--mode", choices=("direct",), default="direct", help="direct: each release goes to all nodes")
    watch.add_argument("--bundles", type=Path, help="where bundles are kept (default: beside model.toml)")
    watch.add_argument("--bases", type=int, metavar="K", help="differences to so many releases of other content (2)")
    watch.add_argument("--skip-gate", action="store_true", help="release what the gate refuses; nodes judge themselves")
    watch.add_argument("--json", action="store_true", help="one JSON object per release on stdout")
    watch.set_defaults(run=_run, bundle=None, force=False)


def _run(args: argparse.Namespace) -> int:
    from common.errors import ConfigError
    from sync.watch.places import place_of

    interval_s, look_s = _seconds("--every", args.every), _seconds("--look", args.look)
    place, home = place_of(args.source), (args.bundles or args.spec.parent / "bundles").resolve()
    if home.is_relative_to(Path(args.source).resolve()):
        problem = f"{home} is in {args.source}: bundles would be taken for checkpoints"
        raise ConfigError("sync watch", "--bundles", problem, "a folder elsewhere")
    watching = Watching(Release.of(args), place, home, interval_s=interval_s, pattern=args.pattern)
    watching.say(f"watching {args.source}: at most one release in {args.every}")
    return every(watching, look_s)


class Watching:
    """One look each time it is asked for, and a release where something new is finished and its time has come."""

    def __init__(
        self,
        release: Release,
        place: Place,
        bundles: Path,
        *,
        interval_s: float,
        pattern: str | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        wanted = spec_with(release.args.spec, None)
        name = Path(wanted.source.checkpoint or wanted.source.onnx or "").name
        self._file = bundles / wanted.name / _WATCHED / name
        self._pattern = pattern or f"*{self._file.suffix}"
        self._release, self._place, self._interval_s, self._now = release, place, interval_s, now
        self._before: Look = {}
        self._due = now()
        self._refused: set[Checkpoint] = set()  # is not whole: looked at again once it has changed
        self._state = self._file.parent / "released.json"
        self._done, self._digest = self._read_state()  # age of the newest that needs no other try; what was released

    def once(self) -> None:
        """Raises what building and publishing raise; the checkpoint is tried again after the interval, unless it is
        itself at fault."""
        from sync.watch.watch import finished

        before, self._before = self._before, self._place.look()
        if self._now() < self._due:
            return
        found = [one for one in finished(before, self._before, self._place.text, self._pattern) if one.age > self._done]
        self._refused &= set(found)
        for checkpoint in found:
            digest = self._take(checkpoint)
            if digest is not None:
                self._publish(checkpoint, digest)
                return

    def _take(self, checkpoint: Checkpoint) -> str | None:
        """What its content hashes to; None where it is not whole, which is said once."""
        from common.errors import CheckpointRefused
        from sync.watch.take import take

        if checkpoint in self._refused:
            return None
        try:
            return take(self._place, self._before, checkpoint, self._file)
        except CheckpointRefused as exc:
            self._refused.add(checkpoint)
            self.say(str(exc))
            return None

    def _publish(self, checkpoint: Checkpoint, digest: str) -> None:
        from common.errors import BuildError
        from sync.disk import write_atomic

        try:
            if digest != self._digest:
                self.say(f"{checkpoint.name} is finished")
                self._release.checkpoint = self._file
                self._due = self._now() + self._interval_s
                self._release.once()
        except BuildError:
            self._done = checkpoint.age
            raise
        self._done, self._digest = checkpoint.age, digest
        write_atomic(self._state, json.dumps({"age": self._done, "digest": digest}).encode())

    def say(self, line: str) -> None:
        self._release.say(line)

    def _read_state(self) -> tuple[tuple[float, str], str]:
        """Of an earlier run: nothing older than what it released is released now."""
        try:
            state = json.loads(self._state.read_bytes())
            changed, name = state["age"]
            return (float(changed), str(name)), str(state["digest"])
        except (OSError, ValueError, TypeError, KeyError):
            return (0.0, ""), ""


def _seconds(flag: str, text: str) -> float:
    from common.errors import ConfigError

    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * _UNITS[found[2] or "s"] if found else 0.0
    if not 0 < seconds <= MAX_INTERVAL_S:
        raise ConfigError("sync watch", flag, f"got {text!r}", f"90s, 15m, 1h; above 0, up to {MAX_INTERVAL_S:g} s")
    return seconds
