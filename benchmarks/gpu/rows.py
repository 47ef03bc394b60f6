"""Rows in a file, one JSON line each: on the disk at once, so that no kill loses one."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
KEY, ERROR = "row", "error"


@dataclass(frozen=True)
class RowFile:
    """Rows by key, of all visits; several processes may add to it."""

    path: Path

    def read(self) -> dict[str, Row]:
        """The last row of each key. A line that was cut off is no row."""
        found: dict[str, Row] = {}
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and KEY in row:
                found[row[KEY]] = row
        return found

    def append(self, row: Row) -> None:
        """Write it, and wait until the disk has it."""
        line = json.dumps(row).encode() + b"\n"
        with self.path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                # After a line that was cut off, another one begins.
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
