"""`outrider publish`: from a model's source to a signed release. Composes builder (`hardware`) and store (`sync`).

A bundle is built once per content of its source: the folder's name is the digest of everything the build reads. With
`--every` the source is read again each interval; what has not changed is neither built nor published again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hardware.build.spec import ModelSpec
    from sync.publisher import Published, Publisher
    from sync.release import Manifest
    from sync.store.stores import AnyStore

DEFAULT_INTERVAL_S = 900.0
MAX_INTERVAL_S = 7 * 86_400.0
_LATEST = "latest"

Progress = Callable[[str], None]


def register(subcommands: Any) -> None:
    publish = subcommands.add_parser("publish", help="build a model and release it to the fleet")
    what = publish.add_mutually_exclusive_group(required=True)
    what.add_argument("spec", type=Path, nargs="?", help="model.toml: built, gated and released")
    what.add_argument("--bundle", type=Path, help="a bundle that was built already")
    publish.add_argument("--store", required=True, help="the store: a folder, or s3://bucket/prefix")
    publish.add_argument("--keys", type=Path, required=True, help="folder of the signing keys")
    publish.add_argument("--bundles", type=Path, help="where bundles are kept (default: beside model.toml)")
    publish.add_argument(
        "--skip-gate", action="store_true", help="release what the gate refuses; nodes judge themselves"
    )
    publish.add_argument("--force", action="store_true", help="a new release even where nothing has changed")
    publish.add_argument(
        "--bases", type=int, metavar="K", help="differences to so many releases of other content, the newest (2)"
    )
    publish.add_argument("--every", action="store_true", help="read the source again each interval, until stopped")
    publish.add_argument(
        "--interval-s", type=float, default=DEFAULT_INTERVAL_S, help="of --every (default %(default)s)"
    )
    publish.add_argument("--json", action="store_true", help="one JSON object per release on stdout")
    publish.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    release = Release.of(args)
    if not args.every:
        release.once()
        return 0
    return every(release, args.interval_s)


class Repeated(Protocol):
    """What `every` does again and again: it says what went wrong, and goes on."""

    def once(self) -> None: ...
    def say(self, line: str) -> None: ...


def every(release: Repeated, interval_s: float) -> int:
    """Until SIGTERM or Ctrl-C. A source that cannot be released now is tried again at the next interval."""
    import signal
    import threading

    from common.errors import ConfigError, OutriderError

    if not 0 < interval_s <= MAX_INTERVAL_S:
        accepted = f"seconds above 0, up to {MAX_INTERVAL_S:g}"
        raise ConfigError("publish", "--interval-s", f"got {interval_s:g}", accepted)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    while not stop.is_set():
        started = time.monotonic()
        try:
            release.once()
        except (OutriderError, OSError) as exc:
            release.say(f"not released: {exc}")
        stop.wait(max(0.0, interval_s - (time.monotonic() - started)))
    return 0


@dataclass(slots=True)
class Release:
    """What one call of the command releases, once or again and again."""

    args: argparse.Namespace
    store: AnyStore
    publisher: Publisher
    refused: str = ""  # digest of a source that cannot be built or is refused: not tried again until it changes
    checkpoint: Path | None = None  # takes the place of the one (or the ONNX file) that model.toml names

    @classmethod
    def of(cls, args: argparse.Namespace) -> Release:
        from common.errors import ConfigError
        from sync.publisher import DELTA_BASES, MAX_BASES, Publisher
        from sync.store.stores import open_store
        from sync.trust.keys import Keys

        store = open_store(args.store)
        bases = DELTA_BASES if args.bases is None else args.bases
        if not 0 <= bases <= MAX_BASES:
            raise ConfigError("publish", "--bases", f"got {bases}", f"0 (no differences) to {MAX_BASES}")
        return cls(args, store, Publisher(store, Keys(args.keys), bases=bases))

    def once(self) -> None:
        from common.errors import BuildError

        folder = self.args.bundle
        if folder is None:
            spec: Path = self.args.spec
            digest = source_digest(spec, self.checkpoint)
            if digest == self.refused:
                return
            bundles = self.args.bundles or spec.parent / "bundles"
            try:
                folder = bundle_of(
                    spec, digest, bundles, checkpoint=self.checkpoint, skip_gate=self.args.skip_gate, say=self.say
                )
            except BuildError:
                self.refused = digest
                raise
        started = time.monotonic()
        published = self.publisher.publish(folder, force=self.args.force)
        if self.args.every and not published.is_new:
            return
        self._report(published, time.monotonic() - started)

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def _report(self, published: Published, seconds: float) -> None:
        name = f"{published.model}/{published.version}"
        if not published.is_new:
            self.say(f"{name} is released already, nothing has changed")
        else:
            new = f"{published.slabs_new} of {published.slabs} slabs are new"
            size = f"{published.bytes_delta} bytes to fetch, {published.bytes_full} in full"
            self.say(f"{name} released (epoch {published.epoch}) in {seconds:.1f} s: {new}, {size}")
        if self.args.json:
            facts = asdict(published) | {"seconds": round(seconds, 3), "variants": self._variants(published)}
            print(json.dumps(facts), flush=True)

    def _variants(self, published: Published) -> list[dict[str, Any]]:
        """What a node with one variant fetches: from nothing, and where it has the release before."""
        manifest = self.publisher.manifest(published.model, published.version)
        assert manifest is not None
        before = self.publisher.manifest(published.model, manifest.parent) if manifest.parent else None
        return [
            {"variant": variant.name, "engine": engine} | _sizes(self.store, manifest, before, files)
            for variant in manifest.variants
            for engine in variant.files
            for files in [manifest.files_for(variant, engine)]
        ]


def _sizes(store: AnyStore, manifest: Manifest, before: Manifest | None, files: tuple[str, ...]) -> dict[str, int]:
    slabs = manifest.slabs(files)
    known = before.slabs() if before else {}
    return {
        "slabs": len(slabs),
        "slabs_new": sum(1 for slab in slabs if slab not in known),
        "bytes_full": sum(store.full_bytes(slab) or 0 for slab in slabs),
    }


def source_digest(spec: Path, checkpoint: Path | None = None) -> str:
    """BLAKE3 (hex) over all that a bundle is made from: model.toml, every file that it names, the source file of its
    torch factory, and the builder itself (this distribution's version). `checkpoint` as in `spec_with`.

    Raises `ConfigError` for a wrong model.toml and `BuildError` for a file that cannot be read.
    """
    from importlib.metadata import version

    from blake3 import blake3

    from common.errors import BuildError

    wanted = spec_with(spec, checkpoint)
    named = (
        wanted.source.onnx,
        wanted.source.checkpoint,
        wanted.calibration.file if wanted.calibration else None,
        wanted.holdout.file,
        wanted.labels,
    )
    digest = blake3(version("outrider").encode())
    files = [spec, *(spec.parent / name for name in named if name is not None)]
    if wanted.source.factory is not None:
        files.append(_code_of(wanted.source.factory))
    for path in files:
        try:
            digest.update(path.name.encode() + b"\0" + blake3(path.read_bytes()).digest())
        except OSError as exc:
            raise BuildError(f"{spec}: {path} cannot be read: {exc.strerror}") from exc
    return digest.hexdigest()


def _code_of(factory: str) -> Path:
    """The file that defines a factory; what that file imports is not looked at."""
    from importlib.util import find_spec

    from common.errors import BuildError

    try:
        found = find_spec(factory.partition(":")[0])
    except (ImportError, ValueError) as exc:
        raise BuildError(f"factory {factory!r} cannot be found: {exc}") from exc
    if found is None or found.origin is None:
        raise BuildError(f"factory {factory!r} cannot be found: no such module is installed here")
    return Path(found.origin)


def spec_with(spec: Path, checkpoint: Path | None) -> ModelSpec:
    """What model.toml asks for; with another checkpoint (or ONNX file) in place of the one that it names."""
    from dataclasses import replace

    from hardware.build.spec import load_spec

    wanted = load_spec(spec)
    if checkpoint is None:
        return wanted
    field = "onnx" if wanted.source.factory is None else "checkpoint"
    return replace(wanted, source=replace(wanted.source, **{field: str(checkpoint.resolve())}))


def bundle_of(
    spec: Path, digest: str, bundles: Path, *, skip_gate: bool, say: Progress, checkpoint: Path | None = None
) -> Path:
    """The bundle of this content, built where it is not there yet, as the successor of the one before."""
    wanted = spec_with(spec, checkpoint)
    home = bundles / wanted.name
    folder = home / (digest[:32] + ("-ungated" if skip_gate else ""))
    if not folder.exists():
        from hardware.build.build import build  # brings torch: two seconds that a bundle which is there does not need

        predecessor = _predecessor(home, wanted.name, say)
        build(wanted, spec.parent, folder, successor_of=predecessor, skip_gate=skip_gate, progress=say)
    if not skip_gate:
        (home / _LATEST).write_text(folder.name + "\n", encoding="utf-8")
    return folder


def _predecessor(home: Path, model: str, say: Progress) -> Path | None:
    """The bundle that was built before, if it is still there and whole: a release never waits for it."""
    from common.errors import BuildError
    from hardware.build.predecessor import Predecessor

    latest = home / _LATEST
    folder = home / latest.read_text(encoding="utf-8").strip() if latest.exists() else None
    if folder is None or not folder.exists():
        return None
    try:
        Predecessor.open(folder, model)
    except BuildError as exc:
        say(f"{model}: built without a predecessor: {exc}")
        return None
    return folder
