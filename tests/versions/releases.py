"""Which releases of torch the tests run on. Their numbers stand elsewhere, each in one place."""

from __future__ import annotations

import re

from remat.graph_capture.torch_private.core import NEWEST, OLDEST
from tests.paths import ROOT


def pinned() -> str:
    """The release that `make` installs."""
    found = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def releases() -> dict[str, str]:
    """Each with what it is, the oldest first."""
    return {OLDEST: "oldest", pinned(): "pinned", NEWEST: "newest"}
