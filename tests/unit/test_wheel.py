"""The wheel: both packages, dashboards and alerts inside, nothing else; extras as promised."""

from __future__ import annotations

import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(REPOSITORY)).build(directory=str(folder))
    return zipfile.Path(path)


@pytest.fixture(scope="module")
def names(wheel: zipfile.Path) -> set[str]:
    return set(wheel.root.namelist())


@pytest.fixture(scope="module")
def metadata_folder(wheel: zipfile.Path) -> zipfile.Path:
    (folder,) = [entry for entry in wheel.iterdir() if entry.name.endswith(".dist-info")]
    return folder


def shipped(folder: str) -> set[str]:
    files = [p for p in (REPOSITORY / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {p.relative_to(REPOSITORY).as_posix() for p in files}


def test_holds_both_packages_whole(names: set[str]):
    assert shipped("dtobs") | shipped("runtime") <= names
    assert "dtobs/py.typed" in names


def test_holds_dashboards_and_alerts(names: set[str]):
    assert {f"dtobs/_share/{name}" for name in shipped("dashboards") | shipped("alerts")} <= names


def test_holds_nothing_else(names: set[str], metadata_folder: zipfile.Path):
    assert {name.split("/")[0] for name in names} == {"dtobs", "runtime", metadata_folder.name}


def test_command_license_and_extras(metadata_folder: zipfile.Path):
    assert "dtobs = dtobs.cli:main" in (metadata_folder / "entry_points.txt").read_text()
    assert (metadata_folder / "licenses" / "LICENSE").exists()
    metadata = Parser().parsestr((metadata_folder / "METADATA").read_text())
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {
        "train",
        "fp8",
        "parquet",
        "prometheus",
        "otel",
        "trace",
        "grafana",
        "mcp",
        "nvml",
        "tui",
        "all",
        "test",
        "bench",
        "fuzz",
        "dev",
    } == extras
    core = {line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert core == {"numpy>=1.26", "xxhash>=3.4"}
