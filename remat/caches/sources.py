"""Which remat this is: what is kept on disk is taken by the same release alone."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import remat.graph_capture
import remat.rewriter
import remat.schedules
import remat.solver


@functools.cache
def sources_key() -> str:
    """Of remat's own files, by their sizes and times: another release may plan otherwise."""
    digest = hashlib.sha256()
    packages = remat, remat.graph_capture, remat.rewriter, remat.schedules, remat.solver
    for package in packages:
        for path in sorted(Path(str(package.__file__)).parent.rglob("*.py")):
            facts = path.stat()
            digest.update(f"{path} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()
