"""schemathesis against a live node and gateway: a sample of what `python -m tests.soak.schema` does at length."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.transport.openapi_operations import OPERATIONS
from tests.soak.schema import Found, explore, live

SEED = 20


@pytest.mark.parametrize(("kind", "is_thorough"), [("edge", True), ("gateway", False)])
async def test_every_answer_is_as_described_and_none_is_a_fault(tmp_path: Path, kind: str, is_thorough: bool) -> None:
    async with live(tmp_path) as addresses:
        for is_narrowed in (False, True):
            found: Found = await asyncio.to_thread(
                explore,
                addresses[kind],
                examples=6 if is_narrowed else 2,
                seed=SEED,
                is_narrowed=is_narrowed,
                is_thorough=is_thorough and is_narrowed,
            )
            assert not found.failures, "\n".join(f"{what}\n{text}" for what, text in found.failures.items())
    labels = {f"{one.method.upper()} {one.path}" for one in OPERATIONS if one.answer}
    assert labels == {label for label, status in found.calls if status == 200}, "a route was never called rightly"
