"""The right answers: each answer that is kept must be what the file of its version gives, straight from ONNX Runtime.

Which file: that of the stage that was pushed as this version (of a version pushed before: one stage, the same for all
its answers), in the variant that its target serves: INT8 on the edge, FP32 in the cloud; a cache has either's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from cloud.publish import source_digest
from common.images import ImagePipeline, prepare
from common.tensors import Array
from edge.client.caller import Answer
from hardware.demo.digits import STAGES

KEPT_EVERY = 7  # calls with a digit; no divisor of the clients' number, so that each client's are among them
TOLERANCE = 1e-3  # of logits up to 16; versions are 0.9 apart, variants of one version 0.03
PHOTO_TOLERANCE = 2e-3  # of the best class's probability
PHOTOS = "efficientnet-lite0"
_INT8, _FP32 = "cpu-int8", "full"
_VARIANTS = {"edge": (_INT8,), "cloud": (_FP32,), "cache": (_INT8, _FP32)}
# The public preprocessing of the EfficientNet-Lite family: 224 pixels out of 256, (pixel - 127) / 128.
_PIPELINE = ImagePipeline(resize=256, crop=224, mean=(127 / 255,) * 3, std=(128 / 255,) * 3)


class Truth:
    """Keeps answers while there is load; `problems` compares them once there is none. Both raise for no such output."""

    def __init__(self, bundles: Path) -> None:
        self._bundles = bundles
        self._digits: dict[str, list[tuple[str, Array, Array]]] = defaultdict(list)  # by version
        self._photos: Counter[tuple[bytes, str, bytes]] = Counter()

    @property
    def kept(self) -> int:
        return sum(map(len, self._digits.values())) + self._photos.total()

    def digit(self, pixels: Array, answer: Answer) -> None:
        logits = np.array(answer.outputs["logits"])
        if logits.shape != (1, 10):
            raise ValueError(f"logits of shape {logits.shape} for one digit")
        self._digits[answer.version].append((answer.target, pixels, logits))

    def photo(self, photo: bytes, answer: Answer) -> None:
        self._photos[photo, answer.target, bytes(answer.outputs["logits"][0, 0])] += 1

    def problems(self, stages: Mapping[str, str]) -> list[str]:
        """`stages`: which stage of `digits` was pushed, by version."""
        found = [] if self._digits and self._photos else ["no answer with a digit, or none with a photo, was compared"]
        for version, rows in self._digits.items():
            candidates = [stages[version]] if version in stages else STAGES
            wrong = {stage: self._wrong(stage, rows) for stage in candidates}
            if wrong := {stage: count for stage, count in wrong.items() if count is not None}:
                stage, count = min(wrong.items(), key=lambda item: item[1])
                if count:
                    what = f"of {len(rows)} answers of digits/{version} are not what stage {stage} gives"
                    found.append(f"{count} {what}")
            else:
                found.append(f"digits/{version} answers, but no bundle of {', '.join(candidates)} is there")
        return found + self._wrong_photos()

    def _wrong(self, stage: str, rows: Iterable[tuple[str, Array, Array]]) -> int | None:
        """How many of the answers the stage's files do not give; None without such files."""
        targets, pixels, logits = zip(*rows, strict=True)
        inputs, got = np.concatenate(pixels), np.concatenate(logits)
        differs = {}
        for variant in (_INT8, _FP32):
            path = self._file("digits", stage, variant)
            if path is None:
                return None
            differs[variant] = ~(np.abs(_run(path, inputs) - got).max(axis=1) <= TOLERANCE)
        return sum(
            all(bool(differs[variant][row]) for variant in _VARIANTS.get(target, ()))
            for row, target in enumerate(targets)
        )

    def _wrong_photos(self) -> list[str]:
        if not self._photos:
            return []
        found = []
        right: dict[tuple[bytes, str], Array] = {}
        for variant in (_INT8, _FP32):
            path = self._file(PHOTOS, "v1", variant)
            if path is None:
                return [f"no bundle of {PHOTOS} to compare answers with"]
            for photo in {photo for photo, _, _ in self._photos}:
                right[photo, variant] = _softmax(_run(path, prepare(photo, _PIPELINE))[0])
        for (photo, target, best), count in self._photos.items():
            score, index = best.split(b":")[:2]
            expected = [right[photo, variant] for variant in _VARIANTS.get(target, ())]
            if not any(
                int(np.argmax(p)) == int(index) and abs(float(p.max()) - float(score)) <= PHOTO_TOLERANCE
                for p in expected
            ):
                wanted = " or ".join(f"{p.max():.6f}:{np.argmax(p)}" for p in expected)
                found.append(f"{count} answers of the target {target!r} say {best!r} of a photo, not {wanted}")
        return found

    def _file(self, model: str, stage: str, variant: str) -> Path | None:
        spec = self._bundles / "sources" / f"{model}-{stage}" / "model.toml"
        if not spec.exists():
            return None
        path = self._bundles / "bundles" / model / source_digest(spec)[:32] / variant / "model.onnx"
        return path if path.exists() else None


def _run(path: Path, rows: Array) -> Array:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    name, parts = session.get_inputs()[0].name, np.array_split(rows, -(-len(rows) // 1024))
    return np.concatenate([np.asarray(session.run(None, {name: part})[0]) for part in parts])


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum())
