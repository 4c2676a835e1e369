"""Pairs of versions that need no checkpoint: weights with rows of their own scale, moved as optimizers and merges do.

Everything follows from a seed. A base has embeddings (some rows of which a step touches), attention and feed-forward
matrices and small vectors. Updates are made in float32 and rounded to the stored type, as training does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from benchmarks.codec.files import Floats, Tensors, to_bf16, to_float

_WORDS, _WIDTH, _LAYERS = 4000, 256, 4
_RANK: Final = 8
_BETAS: Final = (0.9, 0.999)
_DECAY: Final = 0.01

Versions = tuple[Tensors, Tensors]


class Model:
    """float32 weights by name, `size` times as wide as full size (1.0: 4.2 million parameters)."""

    def __init__(self, size: float, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        width, words = max(16, int(_WIDTH * size) // 16 * 16), max(64, int(_WORDS * size))
        shapes: dict[str, tuple[int, ...]] = {"embeddings.word": (words, width)}
        for layer in range(_LAYERS):
            prefix = f"layer.{layer}"
            shapes |= {f"{prefix}.attention.{name}": (width, width) for name in ("query", "key", "value", "out")}
            shapes |= {f"{prefix}.up": (4 * width, width), f"{prefix}.down": (width, 4 * width)}
            shapes |= {f"{prefix}.norm.weight": (width,), f"{prefix}.norm.bias": (width,)}
        self.weights = {name: self._weights(shape) for name, shape in shapes.items()}

    def bf16(self) -> Tensors:
        return {name: to_bf16(values) for name, values in self.weights.items()}

    def adam(self, rate: float, steps: int, *, only: str = "") -> None:
        """AdamW with gradients of each row's own size; a step touches one embedding row in ten."""
        for name, values in self.weights.items():
            if only not in name:
                continue
            mean, square = np.zeros_like(values), np.zeros_like(values)
            size = self._rows(values.shape, 1.5)
            drift = self._normal(values.shape) * size  # what the gradients of all steps share
            touched = np.ones(len(values), bool)
            for step in range(1, steps + 1):
                if name.startswith("embeddings"):
                    touched = self._random.random(len(values)) < 0.1
                gradient = (drift + 2 * size * self._normal(values.shape)) * touched.reshape(
                    -1, *[1] * (values.ndim - 1)
                )
                mean += (1 - _BETAS[0]) * (gradient - mean)
                square += (1 - _BETAS[1]) * (gradient**2 - square)
                moved = mean / (1 - _BETAS[0] ** step) / (np.sqrt(square / (1 - _BETAS[1] ** step)) + 1e-8)
                decay = _DECAY * values if name.startswith("layer") else 0
                values -= (rate * (moved + decay)).astype(np.float32)

    def lora(self, strength: float) -> Tensors:
        """Every matrix with a rank-8 product added, from and to bf16: what a merge of adapters saves."""
        merged = self.bf16()
        for name, words in merged.items():
            if words.ndim == 2:
                left, right = self._normal((len(words), _RANK)), self._normal((_RANK, words.shape[1]))
                merged[name] = to_bf16(to_float(words) + strength * (left @ right) / np.float32(_RANK**0.5))
        return merged

    def _weights(self, shape: tuple[int, ...]) -> Floats:
        if len(shape) == 1:
            return 1 + np.float32(0.1) * self._normal(shape)
        return np.float32(0.04) * self._rows(shape, 0.3) * self._normal(shape)

    def _rows(self, shape: tuple[int, ...], spread: float) -> Floats:
        """One lognormal factor per row."""
        factors: Floats = np.exp(spread * self._normal((shape[0], *[1] * (len(shape) - 1))))
        return factors

    def _normal(self, shape: tuple[int, ...]) -> Floats:
        return self._random.standard_normal(shape, np.float32)


def trained(size: float, rate: float, steps: int, *, only: str = "", wide: bool = False) -> Versions:
    """bf16 before and after, or float32 (`wide`)."""
    model = Model(size)
    before = {name: values.copy() for name, values in model.weights.items()} if wide else model.bf16()
    model.adam(rate, steps, only=only)
    return before, dict(model.weights) if wide else model.bf16()


def half_precision(size: float) -> Versions:
    old, new = trained(size, 1e-5, 5, wide=True)
    return _as_fp16(old), _as_fp16(new)


def lora_merged(size: float) -> Versions:
    model = Model(size)
    return model.bf16(), model.lora(1e-3)


def batch_norm(size: float) -> Versions:
    """float32 convolutions that stay, statistics and affine vectors that move."""
    random = np.random.default_rng(1)
    old: Tensors = {}
    channels = max(8, int(64 * size))
    for block in range(8):
        shape = (channels, channels, 3, 3)
        old[f"block.{block}.conv"] = (0.05 * random.standard_normal(shape)).astype(np.float32)
        for name in ("weight", "bias", "running_mean", "running_var"):
            old[f"block.{block}.norm.{name}"] = random.gamma(2.0, 0.5, channels).astype(np.float32)
        old[f"block.{block}.norm.num_batches_tracked"] = np.array(1000, np.int64)
    new = dict(old)
    for name, values in old.items():
        if "norm.running" in name:
            new[name] = (0.9 * values + 0.1 * random.gamma(2.0, 0.5, channels)).astype(np.float32)
        elif name.endswith("tracked"):
            new[name] = values + 50
    return old, new


def not_a_number(size: float) -> Versions:
    """NaNs with random payloads and infinities of both signs among the weights, some of them new, some gone."""
    old, new = trained(size, 1e-5, 2)
    random = np.random.default_rng(2)
    for tensors in (old, new):
        for words in tensors.values():
            where = random.random(words.shape) < 0.01
            words[where] = random.integers(0x7F80, 0x8000, int(where.sum()), np.uint16) | (
                random.integers(0, 2, int(where.sum()), np.uint16) << 15
            )
    return old, new


def empty_tensors(size: float) -> Versions:
    """Tensors without an element, scalars and rows of one element around a matrix that moves a little."""
    old, new = trained(size, 1e-6, 4, only="layer.0")
    odd: Tensors = {
        "none": np.zeros((0, 16), np.uint16),
        "no_rows": np.zeros((4, 0), np.float32),
        "one": np.ones((), np.float32),
        "thin": np.arange(300, dtype=np.uint16).reshape(300, 1),
    }
    return old | odd, new | odd


def _as_fp16(tensors: Tensors) -> Tensors:
    return {name: values.astype(np.float16) for name, values in tensors.items()}


KINDS: Final[dict[str, Callable[[float], Versions]]] = {
    "LoRA-merged": lora_merged,
    "last layer": lambda size: trained(size, 3e-5, 5, only=f"layer.{_LAYERS - 1}"),
    "RL-like, rate 1e-7": lambda size: trained(size, 1e-7, 4),
    "RL-like, rate 1e-6": lambda size: trained(size, 1e-6, 4),
    "fine-tune": lambda size: trained(size, 2e-5, 8),
    "hot fine-tune": lambda size: trained(size, 1e-3, 8),
    "fine-tune, fp16": half_precision,
    "AdamW steps, fp32": lambda size: trained(size, 1e-5, 4, wide=True),
    "batch-norm statistics": batch_norm,
    "unrelated bases": lambda size: (Model(size, 3).bf16(), Model(size, 4).bf16()),
    "identical": lambda size: (Model(size).bf16(), Model(size).bf16()),
    "NaN payloads": not_a_number,
    "empty tensors": empty_tensors,
}
