"""Writes docs/together.md, what each combination of levers does: `python -m tests.together.table`.

python -m tests.together.table            # all of them, and the page
python -m tests.together.table HS CA      # these alone; nothing is written
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import torch
from torch import nn

from benchmarks.solver_table import replaced
from remat.graph_capture.errors import RematError
from remat.graph_capture.tracing.option_pairs import require_compatible
from remat.solver.reductions.reduction import LEVER_PAIRS
from remat.step_spec import StepSpec
from tests.distributed.launch import torchrun
from tests.fixed_costs import REPLACED, patched
from tests.paths import ROOT
from tests.together.levers import EXCLUDED, LEVERS, RANKS, Language
from tests.together.trial import Outcome, outcome

DOCS, MARKER = ROOT / "docs" / "together.md", "together"
TRIPLES = {
    "SDZ": "Llama fine-tuning", "HSU": "a card of 24 GB", "HFP": "diffusion LoRA, bfloat16",
    "AC": "ResNet, bfloat16, channels-last",
}  # fmt: skip
"""Levers together that people train with, in the order of `LEVERS`."""
AUTOCAST = frozenset(("HFP", "AC"))
OF_MODELS = frozenset(("DT", "CT", "GT", "ZB"))
"""Pairs refused for the DTensors of a model, or unless a third option helps; by no pair alone."""
MARKS = {"exact": "=", "within": "≈", "refused": "no"}
EXCLUDES, FAULT = "x", "!"
_OPTIONS = {"copies": "host"}  # of levers of the solver that have another name


def pairs() -> list[str]:
    return ["".join(pair) for pair in itertools.combinations(LEVERS, 2)]


def refused_by_options() -> set[str]:
    """The pairs whose options a table in the code refuses, before anything is traced."""
    return {pair for pair in pairs() if pair not in EXCLUDED and _is_refused(pair)}


def _is_refused(pair: str) -> bool:
    model: nn.Module = Language(returns_logits="B" in pair)
    given = {k: v for one in pair for k, v in LEVERS[one].given(model).items()}
    of_solver = [{_OPTIONS.get(one, one) for one in both} for both in LEVER_PAIRS]
    if any(both <= given.keys() for both in of_solver):
        return True
    try:
        StepSpec.of({"model": model, "args": (), "budget": "60%", **given})
        if "X" in pair:
            require_compatible(use_arena=True, **given)
    except RematError:
        return True
    return False


# What came of each.


def outcomes(combinations: Iterable[str]) -> dict[str, Outcome]:
    """Tried in this process, on two ranks, or on four where two levers share these out."""
    found, asked = dict[str, Outcome](), list(combinations)
    for n_ranks in (1, 2, 4):
        those = [one for one in asked if ranks_of(one) == n_ranks]
        if those:
            found |= _here(those) if n_ranks == 1 else _on_ranks(n_ranks, those)
    return found


def ranks_of(letters: str) -> int:
    return 2 ** len(RANKS & set(letters))


def _here(combinations: Iterable[str]) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for letters in combinations:
        found[letters] = outcome(letters, is_autocast=letters in AUTOCAST)
        _say(letters, found[letters])
    return found


def _on_ranks(n_ranks: int, combinations: list[str]) -> dict[str, Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        torchrun(n_ranks, "tests/together/worker.py", folder, *combinations)
        files = [Path(folder, f"{rank}.json").read_bytes() for rank in range(n_ranks)]
    ranks = [msgspec.json.decode(file, type=dict[str, Outcome]) for file in files]
    found: dict[str, Outcome] = {}
    for letters in combinations:
        each = [one[letters] for one in ranks]
        found[letters] = min(each, key=lambda it: len(it.text))  # others name the rank that told
        if any(one.verdict != each[0].verdict for one in each):
            told = " / ".join(f"{one.verdict} {one.text}".strip() for one in each)
            found[letters] = Outcome("fails", f"ranks differ: {told}")
        _say(letters, found[letters])
    return found


def _say(letters: str, it: Outcome) -> None:
    figures = f"{it.budget}, {it.predicted_bytes} predicted, {it.measured_bytes} measured"
    sys.stdout.write(f"{letters:4s}{it.verdict:8s} {it.text or figures}, {it.plan_s:.1f} s\n")
    sys.stdout.flush()


# The page.


def page_lines(found: Mapping[str, Outcome]) -> list[str]:
    counted = [found[pair] for pair in pairs() if pair not in EXCLUDED]
    n_working = sum(one.works for one in counted)
    return [
        _row("", *LEVERS), _row(*["---"] * (len(LEVERS) + 1)),
        *(_row(f"**{one}** {lever.name}", *_marks(one, found)) for one, lever in LEVERS.items()),
        "", f"{n_working} of {len(counted)} pairs work.", "",
        _row("together", "", ""), _row("---", "---", "---"),
        *(_row(", ".join(one), what, _told(found[one])) for one, what in TRIPLES.items()),
        "", *_refused_rows(found),
    ]  # fmt: skip


def _row(*entries: str) -> str:
    return f"|{'|'.join(entries)}|"


def _marks(letter: str, found: Mapping[str, Outcome]) -> list[str]:
    return [_mark(_pair(letter, other), found) for other in LEVERS]


def _pair(one: str, other: str) -> str:
    return "".join(sorted(one + other, key=list(LEVERS).index))


def _mark(pair: str, found: Mapping[str, Outcome]) -> str:
    if pair[0] == pair[1]:
        return ""
    return EXCLUDES if pair in EXCLUDED else MARKS.get(found[pair].verdict, FAULT)


def _told(it: Outcome) -> str:
    return it.text if it.verdict == "refused" else MARKS.get(it.verdict, FAULT)


def _refused_rows(found: Mapping[str, Outcome]) -> list[str]:
    """What is refused, by what to do and why."""
    by_text: dict[tuple[str, str], list[str]] = {}
    for pair in pairs():
        if pair not in EXCLUDED and not found[pair].works:
            instead, _, why = found[pair].text.partition(": ")
            why = why.partition(", as ")[2] or why
            by_text.setdefault((why, instead), []).append(pair)
    rows = [_row(", ".join(those), *text) for text, those in by_text.items()]
    nature = [_row(pair, why, "") for pair, why in EXCLUDED.items()]
    return [_row("not", "why", "instead"), _row("---", "---", "---"), *rows, *nature]


def marks_of(document: str) -> dict[str, str]:
    """The marks of pairs on the page."""
    found: dict[str, str] = {}
    for line in document.splitlines():
        cells = line.split("|")[1:-1]
        if line.startswith("|**"):
            letter = cells[0].removeprefix("**")[0]
            found |= {_pair(letter, one): mark for one, mark in zip(LEVERS, cells[1:], strict=True)}
    return {pair: found[pair] for pair in pairs()}


def main(asked: list[str]) -> int:
    """Try combinations, and write the page if these are all."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    everything = [*(one for one in pairs() if one not in EXCLUDED), *TRIPLES]
    with tempfile.TemporaryDirectory() as folder, patched(REPLACED):
        os.environ["REMAT_CACHE"] = folder
        found = outcomes(dict.fromkeys(asked or everything))
    if not asked:
        DOCS.write_text(replaced(DOCS.read_text(), MARKER, page_lines(found)))
    return any(MARKS.get(one.verdict) is None for one in found.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
