"""The documents against the code: the metrics and ports of docs/operations.md, the files and links that all name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cloud.config import GatewayConfig, WorkerConfig
from cloud.gateway import Gateway
from cloud.worker import Worker
from common.up.layout import PORTS
from common.up.ports import DEFAULT_BASE
from edge import CacheOptions, Node, NodeConfig

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/architecture.md", "docs/operations.md")
FOLDERS = "common|hardware|sync|edge|cloud|tests|docs|examples|benchmarks"
TEXT = (ROOT / "docs/operations.md").read_text(encoding="utf-8")


def table(heading: str) -> list[tuple[str, ...]]:
    """The rows of the first table under a heading, without the marks of code."""
    section = TEXT.split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [tuple(cell.strip().replace("`", "") for cell in line.strip("|").split("|")) for line in lines[2:]]


def test_the_table_of_metrics_is_what_the_processes_register() -> None:
    assert table("## Metrics") == metrics()


def metrics() -> list[tuple[str, ...]]:
    processes = {
        "node": Node(NodeConfig(cache=CacheOptions(enabled=False))),
        "worker": Worker(WorkerConfig()),
        "gateway": Gateway(GatewayConfig(workers=("127.0.0.1:1",))),
    }
    found: dict[tuple[str, ...], list[str]] = {}
    for name, process in processes.items():
        for family in process.metrics.registry.collect():
            if family.name.startswith("outrider_"):
                full = family.name + ("_total" if family.type == "counter" else "")
                key = (full, family.type, ", ".join(family._labelnames), family.documentation)
                found.setdefault(key, []).append(name)
    return [(*key[:3], ", ".join(where), key[3]) for key, where in found.items()]


def test_the_table_of_ports_is_what_up_uses() -> None:
    assert [row[:2] for row in table("### Ports of `outrider up`")] == [
        (str(DEFAULT_BASE + i), name) for i, name in enumerate(PORTS)
    ]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_file_that_is_named_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    paths = re.findall(rf"\b(?:{FOLDERS})/[\w/-]+\.(?:py|md|toml|proto)\b", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_the_table_of_packages_has_every_package() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+)/` \|", text, re.MULTILINE)
    packages = {
        str(path.parent.relative_to(ROOT))
        for package in ("common", "hardware", "sync", "edge", "cloud")
        for path in (ROOT / package).rglob("__init__.py")
        if path.parent.name != "proto"
    }
    assert set(listed) == packages | {"tests"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_leads_somewhere(name: str) -> None:
    file = ROOT / name
    links = re.findall(r"\]\((?!https?:)([^)#]+)", file.read_text(encoding="utf-8"))
    assert [link for link in links if not (file.parent / link).exists()] == []
