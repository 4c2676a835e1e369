"""What the load calls a right answer: logits of the file of its version and its target's variant, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from cloud.publish import bundle_of, source_digest
from common.tensors import Array
from edge.client.caller import Answer
from tests.soak.truth import Truth

PIXELS = np.random.default_rng(0).random((1, 1, 8, 8), dtype=np.float32)


def answer(logits: Any, *, model: str = "digits", version: str = "1", target: str = "edge") -> Answer:
    outputs = {} if logits is None else {"logits": logits}
    return Answer(outputs=outputs, target=target, reason=None, model=model, version=version, by="edge-a")


@pytest.fixture(scope="module")
def logits(bundles: Path, digits_sources: dict[str, Path]) -> dict[tuple[str, str], Array]:
    """By stage and variant, from files that the builder made."""
    found = {}
    for stage in ("v1", "v2"):
        spec = digits_sources[stage] / "model.toml"
        folder = bundle_of(spec, source_digest(spec), bundles / "bundles", skip_gate=False, say=lambda _line: None)
        for variant in ("cpu-int8", "full"):
            session = ort.InferenceSession(folder / variant / "model.onnx", providers=["CPUExecutionProvider"])
            found[stage, variant] = np.asarray(session.run(None, {"pixels": PIXELS})[0])
    return found


def _problems(bundles: Path, answers: list[tuple[str, str, Array]], stages: dict[str, str]) -> list[str]:
    truth = Truth(bundles)
    for version, target, array in answers:
        truth.digit(PIXELS, answer(array, version=version, target=target))
    assert truth.kept == len(answers)
    return [text for text in truth.problems(stages) if "compared" not in text]  # no photos here


def test_the_answers_of_each_version_and_target_are_right(bundles: Path, logits: Any) -> None:
    right = [
        ("1", "edge", logits["v1", "cpu-int8"]),
        ("1", "cloud", logits["v1", "full"]),
        ("1", "cache", logits["v1", "full"]),
        ("2", "cache", logits["v2", "cpu-int8"]),
    ]
    assert _problems(bundles, right, {"1": "v1", "2": "v2"}) == []
    assert _problems(bundles, right, {}) == []  # versions of before: each is one stage all along


@pytest.mark.parametrize(
    ("target", "stage", "variant"),
    [("edge", "v2", "cpu-int8"), ("edge", "v1", "full"), ("cloud", "v1", "cpu-int8"), ("cache", "v2", "full")],
)
def test_an_answer_of_another_version_or_variant_is_wrong(
    bundles: Path, logits: Any, target: str, stage: str, variant: str
) -> None:
    answers = [("1", "edge", logits["v1", "cpu-int8"]), ("1", target, logits[stage, variant])]
    expected = ["1 of 2 answers of digits/1 are not what stage v1 gives"]
    assert _problems(bundles, answers, {"1": "v1"}) == expected


def test_a_version_not_pushed_here_cannot_be_two_stages(bundles: Path, logits: Any) -> None:
    answers = [("1", "edge", logits["v1", "cpu-int8"])] * 2 + [("1", "edge", logits["v2", "cpu-int8"])]
    assert _problems(bundles, answers, {}) == ["1 of 3 answers of digits/1 are not what stage v1 gives"]
    assert _problems(bundles, [("1", "edge", np.full((1, 10), np.nan, np.float32))], {}) != []


def test_nothing_compared_is_a_problem(bundles: Path) -> None:
    assert Truth(bundles).problems({}) == ["no answer with a digit, or none with a photo, was compared"]
