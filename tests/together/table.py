"""Writes docs/together.md, what each combination of levers does: `python -m tests.together.table`.

    python -m tests.together.table            # all of them, and the page
    python -m tests.together.table HS CA      # these alone; nothing is written
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import torch

from benchmarks.solver_table import head, replaced, row
from remat.graph_capture.tracing.option_pairs import PAIRS
from tests.distributed.launch import torchrun
from tests.fixed_costs import REPLACED, patched
from tests.paths import ROOT
from tests.together.levers import EXCLUDED, LEVERS, RANKS
from tests.together.trial import Outcome, outcome

DOCS = ROOT / "docs" / "together.md"
TRIPLES = ("SDZ", "HSU", "HFP", "AC")
"""Levers together that people train with, in the order of `LEVERS`."""
AUTOCAST = frozenset(("HFP", "AC"))
OF_MODELS = frozenset(("DT", "CT", "GT"))
"""Pairs refused for what a model holds, where it is looked at, and not for two options."""
MARKS = {"exact": "=", "within": "≈", "refused": "no"}


def pairs() -> list[str]:
    return ["".join(pair) for pair in itertools.combinations(LEVERS, 2)]


def refused_by_options() -> set[str]:
    """The pairs of which the code's table refuses two options."""
    refused = {frozenset((one.one, one.other)) for one in PAIRS}
    found: set[str] = set()
    for pair in pairs():
        options = (LEVERS[letter].options for letter in pair)
        if any(frozenset(both) in refused for both in itertools.product(*options)):
            found.add(pair)
    return found - EXCLUDED.keys()


def outcomes(combinations: Iterable[str]) -> dict[str, Outcome]:
    """What came of each: here, or on two ranks, or on four where two levers share them out."""
    asked = list(combinations)
    found = dict[str, Outcome]()
    for n_ranks in (0, 2, 4):
        those = [one for one in asked if _n_ranks(one) == n_ranks]
        if those:
            found |= _on_ranks(n_ranks, those) if n_ranks else _here(those)
    return {one: found[one] for one in asked}


def _n_ranks(letters: str) -> int:
    return 2 ** len(RANKS & set(letters))  % 8 if RANKS & set(letters) else 0


def _here(combinations: Iterable[str]) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for letters in combinations:
        found[letters] = outcome(letters, is_autocast=letters in AUTOCAST)
        say(letters, found[letters])
    return found


def _on_ranks(n_ranks: int, combinations: list[str]) -> dict[str, Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        torchrun(n_ranks, "tests/together/worker.py", folder, *combinations)
        files = (Path(folder, f"{rank}.json") for rank in range(n_ranks))
        ranks = [msgspec.json.decode(f.read_bytes(), type=dict[str, Outcome]) for f in files]
    found: dict[str, Outcome] = {}
    for letters in combinations:
        each = [rank[letters] for rank in ranks]
        unlike = [one for one in each if one.verdict != each[0].verdict]
        found[letters] = Outcome("fails", f"ranks differ: {each}") if unlike else each[0]
        say(letters, found[letters])
    return found


def say(letters: str, it: Outcome) -> None:
    figures = f"{it.budget} {it.predicted_bytes} {it.measured_bytes} {it.plan_s:.1f} s"
    sys.stdout.write(f"{letters:4s}{it.verdict:8s} {it.text or figures}\n")
    sys.stdout.flush()
