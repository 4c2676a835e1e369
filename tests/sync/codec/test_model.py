"""Table sets fitted to data, and the choice of a form: against entropies computed here, and on a real fine-tune."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from sync import codec
from sync.codec import choice, kernels, model
from sync.codec.choice import Pair
from sync.slabs import slab_id
from tests.sync.codec.reference_encoder import token_of

pytestmark = pytest.mark.skipif(not kernels.HAVE_KERNELS, reason="encoding ctx needs the compiled kernels")

MINILM = Path(__file__).parents[2] / "data" / "minilm"
ROW = 384


def unpacked(name: str) -> NDArray[np.uint8]:
    planes = zstandard.ZstdDecompressor().decompress((MINILM / name).read_bytes())
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(2, -1).T).ravel()


@pytest.fixture(scope="module")
def fine_tune() -> tuple[bytes, bytes]:
    """(step 100, step 150) of one matrix, bf16."""
    base = unpacked("step100.zst")
    return base.tobytes(), (base ^ unpacked("step150-xor-step100.zst")).tobytes()


def pair(raw: bytes, base: bytes, width: int = 2, mantissa: int = 7, row: int = ROW) -> Pair:
    return Pair(raw=raw, base=base, base_id=slab_id(base), width=width, mantissa=mantissa, row=row)


def step(raw: bytes, base: bytes) -> NDArray[np.int64]:
    """Differences of bf16 words as whole numbers, in the order of the numbers that they stand for."""
    new, old = (np.frombuffer(data, "<i2").astype(np.int64) for data in (raw, base))
    return np.where(new < 0, -32768 - new, new) - np.where(old < 0, -32768 - old, old)


def entropy_bytes(symbols: NDArray[np.int64]) -> float:
    counts = np.unique(symbols, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum() / 8)


def limit_bytes(raw: bytes, base: bytes) -> float:
    """Entropy of the steps given the base's exponent (8 bins below the matrix's highest) and 3 classes of rows."""
    steps = step(raw, base)
    exponent = np.frombuffer(base, "<u2").astype(np.int64) >> 7 & 0xFF
    share = (steps.reshape(-1, ROW) != 0).mean(axis=1)
    busy = np.where(share == 0, 0, 1 + (share > np.median(share[share > 0])))
    context = np.minimum(exponent.max() - exponent, 7) * 3 + np.repeat(busy, ROW)
    return sum(entropy_bytes(steps[context == one]) for one in np.unique(context))


def test_a_real_fine_tune_is_coded_below_the_limit(fine_tune: tuple[bytes, bytes]) -> None:
    base, raw = fine_tune
    one = pair(raw, base)
    (tables,) = choice.train([one])
    best = choice.choose(one, (tables,), full_bytes=len(raw))[0]
    assert best.header.form == codec.CTX
    assert codec.decode(best.header, best.payload, base=base, tables=codec.parse_tables(tables.to_bytes())) == raw
    assert len(best.payload) + len(tables.to_bytes()) < limit_bytes(raw, base) * 1.03  # one matrix pays for all tables


def adam(rng: np.random.Generator, rows: int, rate: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Weights, and the same after a step in which rows move by very different amounts."""
    base = (rng.normal(size=(rows, ROW)) * 0.05).astype(np.float32)
    busy = np.exp(rng.normal(size=(rows, 1)) * 1.5)
    return base, (base + rate * busy * rng.normal(size=base.shape)).astype(np.float32)


def bf16(values: NDArray[np.float32]) -> bytes:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def int8(values: NDArray[np.float32], scale: NDArray[np.float32]) -> bytes:
    return np.clip(np.rint(values / scale), -127, 127).astype(np.int8).tobytes()


def test_an_int8_row_whose_scale_changed_gets_a_class_of_its_own() -> None:
    """All that happens is that half the rows have a new scale: what moves is known from the row and the old value."""
    rng = np.random.default_rng(3)
    values = (rng.normal(size=(1024, ROW)) * 0.05).astype(np.float32)
    scale = np.abs(values).max(axis=1, keepdims=True) / 127
    moved = scale * rng.choice([1, 1, 1.008, 1 / 1.008], size=scale.shape)
    base, raw = int8(values, scale), int8(values, moved)
    one = pair(raw, base, 1, 0)
    (tables,) = choice.train([one])
    size = len(choice.choose(one, (tables,), full_bytes=len(raw))[0].payload)
    steps = np.frombuffer(raw, np.int8).astype(np.int64) - np.frombuffer(base, np.int8)
    changed = (steps.reshape(-1, ROW) != 0).any(axis=1)
    assert size < 0.75 * entropy_bytes(
        steps[np.repeat(changed, ROW)]
    )  # given which rows changed, without any other context


@pytest.mark.parametrize(
    ("rate", "form"), [(2e-9, codec.SPARSE), (2e-4, codec.CTX)], ids=["a few elements", "most elements"]
)
def test_the_smallest_form_comes_first(rate: float, form: int) -> None:
    base, new = adam(np.random.default_rng(1), 64, rate)
    one = pair(bf16(new), bf16(base))
    tables = choice.train([one])
    chosen = choice.choose(one, tables, full_bytes=1 << 30)
    sizes = {each.header.form: len(each.payload) for each in choice.differences(one, tables)}
    assert len(chosen[0].payload) == min(sizes.values())
    if form == codec.CTX:
        assert chosen[0].header.form == form
    for each in chosen:
        table = tables[each.header.tables] if each.header.form == codec.CTX else None
        assert codec.decode(each.header, each.payload, base=one.base, tables=table) == one.raw


def test_the_second_choice_is_quicker_on_a_fast_link(fine_tune: tuple[bytes, bytes]) -> None:
    base, raw = fine_tune
    one = pair(raw, base)
    smallest, *others = choice.choose(one, choice.train([one]), full_bytes=len(raw))
    for other in others:
        assert len(other.payload) > len(smallest.payload)
        assert choice.seconds(other.header, choice.FAST_LINK) < choice.seconds(smallest.header, choice.FAST_LINK)
    slow = [choice.seconds(each.header, 1e5) for each in (smallest, *others)]
    assert slow == sorted(slow)


def test_nothing_is_chosen_where_the_slab_itself_is_smaller() -> None:
    rng = np.random.default_rng(2)
    raw, base = bytes(4096), rng.bytes(4096)
    assert choice.choose(pair(raw, base), (), full_bytes=20) == []


def test_an_unchanged_slab_is_the_same() -> None:
    one = pair(bytes(768), bytes(768))
    (only,) = choice.choose(one, choice.train([one]), full_bytes=200)
    assert (only.header.form, only.payload) == (codec.SAME, b"")


def test_a_sample_stays_bounded_and_its_tables_code_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "SAMPLE_ELEMENTS", 3 * 64 * ROW)
    rng = np.random.default_rng(4)
    pairs = []
    for at in range(12):
        base, new = adam(rng, 64, 1e-4 if at % 2 else 1e-3)  # every second slab moves further than all that are seen
        pairs.append(pair(bf16(new), bf16(base)))
    sample = model.Sample(2, 7)
    for one in pairs[::-1]:
        sample.add(one.raw, one.base, one.row)
        assert sample.elements <= 4 * 64 * ROW
    (tables,) = choice.train(pairs[::-1])
    forms = [choice.differences(one, (tables,))[0].header.form for one in pairs]
    assert forms.count(codec.CTX) == len(pairs)


@pytest.mark.parametrize("smooth", [False, True])
def test_frequencies_sum_up_and_leave_nothing_out(smooth: bool) -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 13, 81):
        for counts in (np.zeros(size, np.int64), rng.integers(0, 3, size), rng.integers(0, 10, size) ** 9):
            freqs = model.frequencies(counts, smooth=smooth).astype(np.int64)
            assert freqs.sum() == 4096
            assert (freqs[counts > 0] > 0).all()
            if smooth:
                assert (freqs > 0).all()


def test_tokens_of_the_real_pair_are_those_of_the_document(fine_tune: tuple[bytes, bytes]) -> None:
    base, raw = fine_tune[0][: 2 * ROW], fine_tune[1][: 2 * ROW]
    tokens, _ = kernels.ctx_tokens(raw, base, 2, 7, bytes(256))
    away = np.where(np.frombuffer(base, "<i2") < 0, -1, 1) * step(raw, base)
    assert tokens.tolist() == [token_of(int(d))[0] for d in away]
