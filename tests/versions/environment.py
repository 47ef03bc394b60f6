"""An environment with another release of torch than the one of `constraints.txt`.

torch's wheels bring 3 GB of CUDA libraries, so an environment with torch alone is kept in the
user's cache, for every checkout. The one that tests run in lies in `build/`: it has the checkout,
all else as `constraints.txt` has it, and a path to the kept one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from remat.graph_capture.torch_private.core import NEWEST
from tests.paths import ROOT

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "remat-tests"
MANIFESTS = ("pyproject.toml", "constraints.txt")
SITE = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
DONE = "done"
TORCHTITAN = "torchtitan==0.3.0"
EXTRAS = {NEWEST: "dev,zoo,trainers"}
"""Of each release; `dev` alone of others. Models of libraries run on the newest, which
``pip install .`` brings. pip takes the torchvision that is made for the torch that is there.
"""


def python_with(version: str) -> Path:
    """An interpreter that imports this torch and the checkout: this one, or one that is made."""
    if importlib.metadata.version("torch").partition("+")[0] == version:
        return Path(sys.executable)
    torch = kept(CACHE / f"torch-{version}", "", lambda folder: _install_torch(folder, version))
    manifests = "".join((ROOT / name).read_text() for name in MANIFESTS)
    made_of = f"{manifests}{torch}{_extras(version)}"
    mark = hashlib.sha256(made_of.encode()).hexdigest()
    here = ROOT / "build" / f"torch-{version}"
    return kept(here, mark, lambda folder: _install_rest(folder, version, torch)) / "bin" / "python"


def python_with_torchtitan() -> Path:
    """An interpreter that imports torchtitan and the newest torch; the checkout is not in it."""
    torch = kept(CACHE / f"torch-{NEWEST}", "", lambda folder: _install_torch(folder, NEWEST))
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    mark = hashlib.sha256(f"{TORCHTITAN}{needed}{torch}".encode()).hexdigest()
    what = (TORCHTITAN, f"torch=={NEWEST}", *needed)
    here = CACHE / TORCHTITAN.replace("==", "-")
    found = kept(here, mark, lambda folder: _install_beside(folder, torch, *what))
    return found / "bin" / "python"


def kept(folder: Path, mark: str, install: Callable[[Path], None]) -> Path:
    """The folder with an environment in it, made once; one that was cut off half-way, anew.

    The file `done` is written last. Another mark in it is that of other manifests.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # another checkout may be at it
        done = folder / DONE
        if not (done.exists() and done.read_text() == mark and (folder / SITE).exists()):
            shutil.rmtree(folder, ignore_errors=True)
            print(f"making {folder}", flush=True)
            install(folder)
            done.write_text(mark)
    return folder


def _install_torch(folder: Path, version: str) -> None:
    _make(folder)
    _pip(folder, f"torch=={version}")


def _install_rest(folder: Path, version: str, torch: Path) -> None:
    _install_beside(folder, torch, f"torch=={version}", "-e", f".[{_extras(version)}]")


def _install_beside(folder: Path, torch: Path, *what: str) -> None:
    _make(folder)
    (folder / SITE / "torch.pth").write_text(f"{torch / SITE}\n")
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(line for line in lines if not line.startswith("torch==")))
    _pip(folder, "-c", str(constraints), *what)


def _extras(version: str) -> str:
    return EXTRAS.get(version, "dev")


def _make(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)


def _pip(folder: Path, *what: str) -> None:
    command = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run([*command, "install", "--quiet", "--quiet", *what], cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"pip could not install {' '.join(what)} into {folder}: see above")
