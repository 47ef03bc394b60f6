"""What each rank runs: ways under columns one by one, what came of each into a file of its own.

Run as ``torchrun --nproc-per-node N tests/distributed/ways/worker.py FOLDER COLUMN:WAY...``.
"""

from __future__ import annotations

import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.distributed.launch import end_process, join
from tests.distributed.ways.outcome import Outcome
from tests.distributed.ways.rows import WAYS
from tests.distributed.ways.trial import outcome
from tests.fixed_costs import REPLACED, patched


def main(folder: Path, asked: list[str]) -> None:
    join(timedelta(seconds=30))
    found: dict[str, Outcome] = {}
    ways = {way.name: way for way in WAYS}
    with patched(REPLACED):
        for one in asked:
            column, name = one.split(":", 1)
            began = time.perf_counter()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found[one] = outcome(ways[name], column)
            words = [str(one.message) for one in said if "DistributedDataParallel is" in str(one)]
            if words and not found[one].text:
                found[one] = msgspec.structs.replace(found[one], text=words[0])
            (folder / f"{dist.get_rank()}.json").write_bytes(msgspec.json.encode(found))
            if dist.get_rank() == 0:
                it, seconds = found[one], time.perf_counter() - began
                sys.stdout.write(f"{one}: {it.verdict} {it.ratio} {it.text} ({seconds:.1f} s)\n")
                sys.stdout.flush()
            dist.barrier()
    dist.destroy_process_group()
    end_process()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
