"""The two models that the one-machine system starts with, and the later versions of `digits` that the tour releases."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """`stage` is what `outrider demo prepare` is asked for; `factory` is what workers build the model from."""

    name: str
    factory: str
    stage: str = "v1"

    @property
    def source(self) -> str:
        """Name of the folder with model.toml, checkpoint and data."""
        return f"{self.name}-{self.stage}"


PHOTOS = DemoModel(name="efficientnet-lite0", factory="hardware.demo.efficientnet:factory")
DIGITS = DemoModel(name="digits", factory="hardware.demo.digits:factory")


def digits(stage: str) -> DemoModel:
    return DemoModel(name=DIGITS.name, factory=DIGITS.factory, stage=stage)
