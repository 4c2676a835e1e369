"""The five plain package names are this distribution's alone, and what the wheel promises."""

from importlib.metadata import entry_points, packages_distributions

import pytest

NAMES = ("common", "hardware", "sync", "edge", "cloud")


@pytest.mark.parametrize("name", NAMES)
def test_the_package_name_belongs_to_this_distribution_alone(name: str) -> None:
    owners = set(packages_distributions().get(name, []))
    assert owners <= {"outrider"}, f"{name} is also installed by {owners - {'outrider'}}: use a venv of its own"


def test_every_subcommand_is_registered_by_its_package() -> None:
    registered = {entry.name: entry.value.split(".")[0] for entry in entry_points(group="outrider.commands")}
    assert registered == {
        "up": "common",
        "status": "common",
        "model": "hardware",
        "demo": "hardware",
        "publish": "cloud",
        "sync": "sync",
        "edge": "edge",
        "cloud": "cloud",
        "keys": "common",
    }
