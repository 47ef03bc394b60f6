"""Lays the packages out as they are installed, so that the API can be read without importing it.

Import names and folders differ (`remat.solver` is `solver/`), and mkdocstrings finds sources by
folder. Modules are copied, not linked: it would follow a link and look beside its target.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TREE = ROOT / "build" / "package_tree"


def on_startup(**_: Any) -> None:
    """Called by mkdocs before its plugins are set up, which leave out paths that are not there."""
    copy_packages(TREE)


def copy_packages(tree: Path) -> None:
    """Copy every module of every package into the folder of its import name, anew."""
    shutil.rmtree(tree, ignore_errors=True)
    manifest = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = manifest["tool"]["setuptools"]
    folders: dict[str, str] = setuptools["package-dir"]
    for package in setuptools["packages"]:
        target = tree.joinpath(*package.split("."))
        target.mkdir(parents=True, exist_ok=True)
        for module in (ROOT / _folder(package, folders)).glob("*.py"):
            shutil.copy(module, target / module.name)


def _folder(package: str, folders: dict[str, str]) -> str:
    """Where the package lies: its own entry of `package-dir`, or one of a package above it."""
    name, rest = package, list[str]()
    while name not in folders:
        name, _, last = name.rpartition(".")
        rest.insert(0, last)
    return "/".join([folders[name], *rest])
