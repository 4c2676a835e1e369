"""`outrider sync watch`: each interval a trainer's newest finished checkpoint becomes a release.

Composes what finds it (`sync/watch/`) with the way of `outrider publish`: build as the successor of the bundle
before, gate, release to all nodes (*direct*), or only when the release before has come to its end on the nodes
(*train*: the newest waits, those between are skipped). It stands here because it builds, which `sync` cannot.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cloud.publish import MAX_INTERVAL_S, Release, every, spec_with

if TYPE_CHECKING:
    from sync.fleet import NodeReport
    from sync.release import Desired
    from sync.watch.places import Place
    from sync.watch.train import Rollouts
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
    watch.add_argument(
        "--mode",
        choices=("direct", "train"),
        default="direct",
        help="direct: a release each interval; train: only when the one before has ended on the nodes (direct)",
    )
    watch.add_argument(
        "--fleet", type=Path, metavar="STATE", help="train: the sync service's state folder (`serve --state`)"
    )
    watch.add_argument(
        "--deadline", metavar="TIME", help="train: after which a rollout counts as ended (four times --every)"
    )
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
    release = Release.of(args)
    rollouts = _train(args, release, interval_s) if args.mode == "train" else None
    if args.mode == "direct" and (args.fleet is not None or args.deadline is not None):
        raise ConfigError("sync watch", "--fleet, --deadline", "belong to another mode", "with --mode train")
    watching = Watching(release, place, home, interval_s=interval_s, pattern=args.pattern, rollouts=rollouts)
    watching.say(f"watching {args.source}: at most one release in {args.every}, mode {args.mode}")
    return every(watching, look_s)


def _train(args: argparse.Namespace, release: Release, interval_s: float) -> Train:
    from common.errors import ConfigError
    from sync.fleet import DATABASE, read_fleet

    if args.fleet is None or not (args.fleet / DATABASE).is_file():
        problem = "is not given" if args.fleet is None else f"{args.fleet} has no {DATABASE}"
        raise ConfigError("sync watch", "--fleet", problem, "the folder of `sync serve --state`: nodes report there")
    deadline_s = 4 * interval_s if args.deadline is None else _seconds("--deadline", args.deadline)
    return Train(
        lambda: read_fleet(args.fleet / DATABASE),
        release.publisher.current,
        home=args.fleet / "train",
        deadline_s=deadline_s,
    )


class Train:
    """Whether what was released last, by whomever, has come to its end on the nodes. `home`: what has to outlive this
    process; the service's clock is this machine's, as is its database."""

    def __init__(
        self,
        fleet: Callable[[], Sequence[NodeReport]],
        current: Callable[[str], Desired | None],
        *,
        home: Path,
        deadline_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._fleet, self._current, self._home = fleet, current, home
        self._deadline_s, self._now = deadline_s, now

    def in_progress(self, model: str) -> str | None:
        from sync.watch.train import Offer, waits_for

        desired = self._current(model)
        if desired is None:
            return None
        since = self._since(model, desired.epoch)
        offer = Offer(model=model, version=desired.version, epoch=desired.epoch, since=since)
        return waits_for(offer, self._fleet(), self._now(), self._deadline_s)

    def _since(self, model: str, epoch: int) -> float:
        """When this epoch was first seen here: a moment after it was signed, at most one look."""
        from sync.disk import write_atomic

        path = self._home / f"{model}.json"
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            seen = json.loads(path.read_bytes())
            if seen["epoch"] == epoch and float(seen["since"]) <= self._now():
                return float(seen["since"])
        self._home.mkdir(parents=True, exist_ok=True)
        since = self._now()
        write_atomic(path, json.dumps({"epoch": epoch, "since": since}).encode())
        return since


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
        rollouts: Rollouts | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rollouts`: whose end a release waits for; None: for nobody's."""
        wanted = spec_with(release.args.spec, None)
        self._model, self._rollouts, self._told = wanted.name, rollouts, ""
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
        waits_for = self._in_progress()
        if found and waits_for is not None:
            self._tell(waits_for)
            return
        for checkpoint in found:
            digest = self._take(checkpoint)
            if digest is not None:
                self._publish(checkpoint, digest)
                return

    def _in_progress(self) -> str | None:
        """What the rollout before still waits for. Asked at every look that may release, and just after a release: so
        it is known since when the nodes could have heard of it."""
        return None if self._rollouts is None else self._rollouts.in_progress(self._model)

    def _tell(self, waits_for: str) -> None:
        """Once, and whenever it has changed by more than the time that is left."""
        told, self._told = self._told, re.sub(r"\d+ (min|s)\b", "", waits_for)
        if told != self._told:
            self.say(f"the newest checkpoint waits: {waits_for}")

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
                self._in_progress()
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
