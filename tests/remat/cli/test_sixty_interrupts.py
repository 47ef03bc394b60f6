"""Ctrl-C at sixty random moments of all verbs: an end in 2 s, whole files, and no process left.

It reads a clock, so it is for a quiet machine. It prints how long each took: ``-s``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remat.cli.main import VERBS
from remat.cli.session import STOPPED
from tests.paths import ROOT
from tests.remat.cli.conftest import EXAMPLES, SIZES
from tests.remat.cluster.capture import chains

ENDS_S, INTERRUPTS = 2.0, 60
SOON_S = 600.0
"""Of what no Ctrl-C ends: a verb that is done sooner, and the plans to begin with."""
SPELL_S = 0.05
EARLY = 5
"""Each fifth is interrupted from its imports on, the others once they are at work."""
SILENT = ("doctor", "show")
"""Verbs that say nothing of what they do."""
GPT = f"{EXAMPLES / 'gpt.py'}:factory"
CHAIN = f"{chains.__name__}:small_llama"
CLUSTER = ("--gpus", "8", "--node-size", "4", "--batch", "16", "--seq", "32")
BEGUN = "begun"
CODE = f"""
import sys
from remat.cli.entry import command
print({BEGUN!r}, file=sys.stderr, flush=True)
command()
"""
BEST = "this is the best that was found until then"
NO_PROC = pytest.mark.skipif(sys.platform != "linux", reason="no /proc to find processes in")


def verbs(folder: Path) -> list[list[str]]:
    """What is interrupted; the long ones more often. Each that writes, writes to ``out.*``."""
    graph, plan, of_gpt = (str(folder / name) for name in ("graph.json", "plan.json", "gpt.json"))
    kept = ["-o", "out.json"]
    return [
        ["run", GPT, "--budget", "55%", *kept],
        ["run", graph, "--budget", "55%", *kept],
        ["sweep", graph, *kept],
        ["show", graph, "--explain", "--budget", "55%"],
        ["largest-batch", GPT, "--budget", "200MiB", *kept],
        ["sweep", graph, "--solver", "usual"],
        ["run", graph, "--budget", "min", *kept],
        ["show", GPT, "--as", "graph", *kept],
        ["sweep", graph, "--jobs", "2", *kept],
        ["check", GPT, of_gpt],
        ["run", GPT, "--budget", "min", *kept],
        ["profile", GPT, *kept],
        ["show", plan, "--why", "*"],
        ["report", plan, "-o", "out.html"],
        ["show", GPT, "--plan", of_gpt, "-o", "out.py"],
        ["show", graph],
        ["show", plan, "-o", "out.trace.json"],
        ["run", GPT, "--budget", "70%", "--price-of-gib", *kept],
        ["doctor"],
        ["cluster", CHAIN, *CLUSTER, *kept],
    ]


def begun(*words: str, cwd: Path) -> subprocess.Popen[str]:
    """A verb that has begun to be imported."""
    size = {f"GPT_{name}": value for name, value in SIZES.items()}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
        env={**os.environ, **size, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == f"{BEGUN}\n"
    return process


def none_is_left(folder: Path) -> bool:
    """Whether no process that began in `folder` is there after a while."""
    until_s = time.monotonic() + ENDS_S
    while any(_folder_of(one) == folder for one in Path("/proc").glob("[0-9]*")):
        if time.monotonic() > until_s:
            return False
        time.sleep(SPELL_S)
    return True


def _folder_of(process: Path) -> Path | None:
    try:
        return (process / "cwd").readlink()
    except OSError:  # it has ended, or is not ours
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a graph, a plan of it, and a plan of the example GPT."""
    path = tmp_path_factory.mktemp("kept")
    for words in (
        ["show", str(EXAMPLES / "unet.py"), "--as", "graph", "-o", "graph.json"],
        ["run", "graph.json", "--budget", "70%", "--time-limit", "2", "-o", "schedule.json"],
        ["run", GPT, "--no-check", "--budget", "80%", "--time-limit", "2", "-o", "gpt.json"],
        ["run", str(EXAMPLES / "unet.py"), "--no-check", "--budget", "70%", "--time-limit", "2",
         "-o", "plan.json"],
    ):  # fmt: skip
        process = begun(*words, cwd=path)
        process.communicate(timeout=SOON_S)
        assert process.returncode == 0, words
    return path


@pytest.mark.slow
@pytest.mark.clock
@NO_PROC
def test_sixty_random_interrupts(folder: Path, tmp_path: Path) -> None:
    source, every, slow = random.Random(0), verbs(folder), list[str]()
    for number in range(INTERRUPTS):
        words, place = every[number % len(every)], tmp_path / str(number)
        place.mkdir()
        process = begun(*words, cwd=place)
        if number % EARLY and words[0] not in SILENT:
            assert process.stderr is not None
            process.stderr.readline()  # it is at work
        after_s = SPELL_S + source.choice([0.5, 1.0, 2.0, 4.0, 8.0]) * source.random()
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        began_s = time.monotonic()
        out, said = process.communicate(timeout=SOON_S)
        took_s = time.monotonic() - began_s
        told = f"{number}: {' '.join(words)}, after {after_s:.2f} s: {took_s:.2f} s, {said}"
        print(told.splitlines()[0], process.returncode)
        if took_s > ENDS_S:
            slow.append(told)
        assert process.returncode in (0, STOPPED, -signal.SIGINT), told
        assert "Traceback" not in out + said, told
        assert none_is_left(place), told
        names = [file.name for file in place.iterdir()]
        assert names == [] or names == [words[-1]], told
        # A result that is shown, or all of it, is kept too.
        if words[-2:-1] == ["-o"] and (process.returncode == 0 or BEST in said):
            assert names, told
        for file in place.glob("*.json"):
            assert json.loads(file.read_text()), told
    assert slow == []


def test_every_verb_is_among_them(tmp_path: Path) -> None:
    assert {words[0] for words in verbs(tmp_path)} == set(VERBS)
