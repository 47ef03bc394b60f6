"""From the root of a checkout the checkout is imported, however and whatever was installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from remat.checkout import BESIDE
from tests.paths import ROOT

# Runs when Python starts, after the editable installation of the environment that runs the tests.
NO_EDITABLE = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in str(one)]
"""
EDITABLE = """
from importlib.util import spec_from_file_location

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("remat.") and name.count(".") == 1:
            folder = "INSTALLED/remat/" + name[6:]
            import os.path
            if os.path.isdir(folder):
                return spec_from_file_location(name, folder + "/__init__.py")

sys.meta_path.append(Finder())
"""
FILES = """
import json, sys
from importlib.util import find_spec
import remat.cli.main, remat.job.pipeline, remat.solver.table, remat.schedules.schedule
import remat.graph_capture.graph
if {with_torch}:
    import remat.graph_capture.capture_api, remat.rewriter.graphs.emit
files = {{k: m.__file__ for k, m in list(sys.modules.items()) if k.split(".")[0] == "remat"}}
files["remat.rewriter"] = find_spec("remat.rewriter").origin
print(json.dumps(files))
"""
WITH_TORCH, WITHOUT_TORCH = FILES.format(with_torch=True), FILES.format(with_torch=False)
INSTANCE = {
    "nodes": [{"id": one, "cost": 1, "bytes": 1} for one in range(3)],
    "edges": [[0, 1], [1, 2]],
    "constant_bytes": 0,
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages where `pip install .` puts them."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "remat", folder / "remat")
    for name in BESIDE:
        shutil.copytree(ROOT / name, folder / "remat" / name)
    return folder


@pytest.fixture(params=["nothing", "a copy", "another checkout, editable"])
def environment(request: pytest.FixtureRequest, installed: Path, tmp_path: Path) -> dict[str, str]:
    """What Python is started with, for each way to install."""
    way = request.param
    code = EDITABLE.replace("INSTALLED", str(installed)) if "edit" in way else ""
    (tmp_path / "sitecustomize.py").write_text(NO_EDITABLE + code)
    folders = [tmp_path, installed] if way == "a copy" else [tmp_path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}


def run(environment: dict[str, str], *words: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [pytest.param(WITH_TORCH, marks=pytest.mark.slow, id="all"),
     pytest.param(WITHOUT_TORCH, id="those without torch")],
)  # fmt: skip
def test_each_module_is_the_checkouts_and_is_imported_once(
    environment: dict[str, str], code: str
) -> None:
    files = json.loads(run(environment, "-c", code))
    assert {name.split(".")[1] for name in files if "." in name} >= {*BESIDE, "cli", "job"}
    assert [file for file in files.values() if not Path(file).is_relative_to(ROOT)] == []
    assert len(set(files.values())) == len(files)


@pytest.mark.slow
def test_the_commands_run_in_the_root(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(INSTANCE))
    said = json.loads(run(environment, "-m", "benchmarks.instance", str(path), "--budget", "3"))
    assert said["status"] == "optimal"
    assert "Usage: python -m remat" in run(environment, "-m", "remat", "--help")


@pytest.mark.slow
def test_elsewhere_the_installed_one_is_imported(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_EDITABLE)
    folders = os.pathsep.join(map(str, (tmp_path, installed)))
    environment = {**os.environ, "PYTHONPATH": folders}
    files = json.loads(run(environment, "-c", WITH_TORCH, cwd=tmp_path))
    assert [file for file in files.values() if not Path(file).is_relative_to(installed)] == []
    assert "Usage: python -m remat" in run(environment, "-m", "remat", "--help", cwd=tmp_path)


def test_what_lies_beside_is_what_the_manifest_moves_in() -> None:
    manifest = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    moved = {name: folder for name, folder in manifest["package-dir"].items() if name != "remat"}
    assert moved == {f"remat.{name}": name for name in BESIDE}
