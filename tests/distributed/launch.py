"""Starts a worker on several ranks, ends it there, and reads what each of them found."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from remat.graph_capture.errors import RematError
from tests.paths import ROOT

TIMEOUT_S = 1800

Found = list[dict[str, dict[str, Any]]]
"""What each rank found, by case."""


def torchrun(n_ranks: int, *words: str, limit_s: float = TIMEOUT_S) -> str:
    """Standard output of a script that ran on `n_ranks` ranks, one thread each.

    What has not ended within the limit is ended with all its ranks, and fails.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*launch, "--nproc-per-node", str(n_ranks), *words],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        said, errors = process.communicate(timeout=limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-4000:]
    return said


def refused(act: Callable[[], Any]) -> dict[str, str]:
    """The kind and the text of the error with which `act` is refused; both empty if it is not."""
    try:
        act()
    except RematError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "", "text": ""}


def require_refused(said: Mapping[str, str], as_told: tuple[str, str]) -> None:
    """Fail unless a rank said that it was refused with an error of a kind, whose text matches."""
    kind, text = as_told
    assert said["error"] == kind, said
    assert re.search(text, said["text"]), said


def join(timeout: timedelta | None = None) -> None:
    """Make this process a rank over gloo, of one thread.

    Python's collector walks torch's million objects no more, and the others less often, as in
    the process that runs the tests: tracing makes very many.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timeout)
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def leave(folder: Path, found: Mapping[str, object]) -> NoReturn:
    """Write what this rank found, and end its process."""
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    end_process()


def end_process() -> NoReturn:
    """End this process without taking the interpreter down.

    Threads of gloo may still hold tensors. One that lets go of a tensor while Python ends aborts
    the process (https://github.com/pytorch/pytorch/pull/179291).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def ranks(
    worker: str, folder: Path, n_ranks: int, *cases: str, limit_s: float = TIMEOUT_S
) -> Found:
    """Run cases of a worker of this folder; all of them where none is named."""
    script = f"tests/distributed/{worker}"
    torchrun(n_ranks, script, str(folder), *cases, limit_s=limit_s)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(n_ranks)]
