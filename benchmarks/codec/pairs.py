"""The pairs of files that the codec is measured on, written into a folder one pair at a time.

From checkpoints (`base`, `step100`, `step101`, `step150.safetensors`, bf16): P1 is step 100 -> 150, P0 base -> 100,
P3 100 -> 101; each as it is, as int8, and as int8 with the scales of the version before. Besides, `synthetic`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.codec import synthetic
from benchmarks.codec.files import Tensors, quantized, read, write

STEPS: Final = {"P1": ("step100", "step150"), "P0": ("base", "step100"), "P3": ("step100", "step101")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Two versions of a file. `is_real`: from checkpoints, not from a generator."""

    name: str
    old: Path
    new: Path
    is_real: bool = False


def pairs(folder: Path, *, checkpoints: Path | None, size: float, names: tuple[str, ...] = ()) -> Iterator[Files]:
    """`size`: of the generated ones. `names`: these alone. A pair is gone when the next one is asked for."""
    if checkpoints is not None:
        for name, (old, new) in STEPS.items():
            yield from _wanted(
                _real(folder, name, checkpoints / f"{old}.safetensors", checkpoints / f"{new}.safetensors"), names
            )
    for name, make in synthetic.KINDS.items():
        if not names or name in names:
            yield _written(folder, name, *make(size), is_real=False)


def _wanted(found: Iterator[Files], names: tuple[str, ...]) -> Iterator[Files]:
    return (one for one in found if not names or one.name in names)


def _real(folder: Path, name: str, old: Path, new: Path) -> Iterator[Files]:
    yield Files(name=f"{name} bf16", old=old, new=new, is_real=True)
    before, after = read(old), read(new)
    base = quantized(before)
    yield _written(folder, f"{name} int8", base, quantized(after), is_real=True)
    yield _written(folder, f"{name} int8 kept scales", base, quantized(after, like=base), is_real=True)


def _written(folder: Path, name: str, old: Tensors, new: Tensors, *, is_real: bool) -> Files:
    return Files(
        name=name,
        old=write(folder / "old.safetensors", old),
        new=write(folder / "new.safetensors", new),
        is_real=is_real,
    )
