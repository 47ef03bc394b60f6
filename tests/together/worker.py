"""What each rank runs: combinations one by one, what came of each into a file of its own.

Run as ``torchrun --nproc-per-node N tests/together/worker.py FOLDER LETTERS...``.
"""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.distributed.launch import join, leave
from tests.fixed_costs import REPLACED, patched
from tests.together.trial import Outcome, outcome


def main(folder: Path, combinations: list[str]) -> None:
    join(timedelta(minutes=2))
    warnings.simplefilter("ignore")
    found: dict[str, Outcome] = {}
    with patched(REPLACED):
        for letters in combinations:
            found[letters] = outcome(letters)
            dist.barrier()
    leave(folder, msgspec.to_builtins(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
