"""Figures of a GPU that is lent for minutes: `python -m benchmarks.gpu prepare | run | page`.

Beforehand, on a CPU, `prepare` fills a folder that git ignores with solved plans and wheels:

    python -m benchmarks.gpu prepare .gpu

On the day, two commands on the machine with the GPU, the first for ten minutes:

    python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/site .gpu/wheels/* &&
    PYTHONPATH=/tmp/site python3 -u -m benchmarks.gpu run --seconds 560 --carried .gpu/plans \
        --rows $OUT/rows.jsonl --out $OUT

and the second, with the rows of the first back in `.gpu/rows.jsonl`, for what is left:

    cp .gpu/rows.jsonl $OUT && python3 -m pip install (as above) &&
    PYTHONPATH=/tmp/site python3 -u -m benchmarks.gpu run --seconds 180 --carried .gpu/plans \
        --rows $OUT/rows.jsonl --out $OUT

Rows that are there are not measured again. Then copy `rows.jsonl` to `benchmarks/results/gpu`, and
`python -m benchmarks.gpu page` writes docs and README. `run --rehearse` does all of it on a CPU,
in the same order, with small models: what it writes says nothing of a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import sys
import time
from pathlib import Path

from benchmarks.gpu.scheduler import begin_imports

MOST_WORKERS = 8


def main() -> int:
    """Do what is asked."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("prepare", help="solve plans, and fetch wheels")
    verb.add_argument("folder", type=Path)
    verb.add_argument("--rehearse", action="store_true", help="plans of small models")
    verb.add_argument("--only", nargs="*", help="models, or wheels")
    verb = verbs.add_parser("run", help="measure")
    verb.add_argument("--seconds", type=float, required=True, help="all ends by then")
    verb.add_argument("--rows", type=Path, required=True, help="a JSON line for each row")
    verb.add_argument("--out", type=Path, help="folder for profiles and costs")
    verb.add_argument("--carried", type=Path, help="folder of plans that were solved before")
    verb.add_argument("--rehearse", action="store_true", help="on a CPU, with small models")
    verbs.add_parser("page", help="write docs and README from the rows that there are")
    return _done(parser.parse_args())


def _done(asked: argparse.Namespace) -> int:
    # Imports take seconds, and each verb needs others.
    if asked.verb == "page":
        from benchmarks.gpu import page

        page.write()
        return 0
    if asked.verb == "prepare":
        from benchmarks.gpu.prepare import prepare

        prepare(asked.folder, asked.only, rehearse=asked.rehearse)
        return 0
    deadline_s = time.monotonic() + asked.seconds
    if not (asked.rehearse or _has_gpu()):
        print("benchmarks.gpu: pass --rehearse: there is no CUDA device here", file=sys.stderr)
        return 2
    if asked.rehearse:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # its processes share few cores
    asked.rows.parent.mkdir(parents=True, exist_ok=True)
    begin_imports()
    from benchmarks.gpu.visit import begin_visit

    workers = max(2, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))
    left = begin_visit(
        asked.rows, deadline_s, asked.out, asked.carried, rehearse=asked.rehearse, workers=workers
    )
    print(f"{len(left)} rows are left", *left, sep="\n  ", flush=True)
    return 0


def _has_gpu() -> bool:
    # Where the driver answers, torch is not waited for.
    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL("libcuda.so.1").cuInit(0) == 0:
            return True
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
