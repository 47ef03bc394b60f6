"""Finds the packages that lie beside `remat/` in a checkout, not those of another checkout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

BESIDE = ("graph_capture", "rewriter", "schedules", "solver")
PACKAGE_FOLDER = Path(__file__).resolve().parent


class _BesideFinder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        if parent != "remat" or name not in BESIDE:
            return None
        # Whoever imports a remat from elsewhere in this process gets the packages of that one.
        if PACKAGE_FOLDER not in (Path(one).resolve() for one in path or ()):
            return None
        return spec_from_file_location(fullname, PACKAGE_FOLDER.parent / name / "__init__.py")


def find_beside() -> None:
    """Have the packages found in a checkout. It does nothing where they were installed."""
    if (PACKAGE_FOLDER / BESIDE[0]).is_dir():
        return
    sys.meta_path.insert(0, _BesideFinder())  # first: an editable installation may have others
