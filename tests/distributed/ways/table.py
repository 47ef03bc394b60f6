"""The table of docs/distributed.md: a row for each way of training, a column for each wrapper."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from benchmarks.solver_table import replaced
from tests.distributed.launch import torchrun
from tests.distributed.ways.outcome import Outcome
from tests.distributed.ways.parts import make_plan
from tests.distributed.ways.rows import WAYS
from tests.distributed.ways.trial import COLUMNS, PARTS
from tests.paths import ROOT

DOCS, _MARKER = ROOT / "docs" / "distributed.md", "ways"
FAULT, UNTRIED = "!", ""
_MARKS = {"exact": "=", "within": "≈", "refused": "no", "over": "over"}
_WORST = ("exact", "within", "over", "differs", "fails", "refused")
_ENDED = Outcome("fails", "the rank has ended")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORDS = 6  # of a refusal, of which the first say what to do


def everything() -> list[str]:
    return [f"{column}:{way.name}" for way in WAYS for column in way.columns]


def outcomes(asked: Iterable[str]) -> dict[str, Outcome]:
    """By column and way: one start of ranks runs all that take as many of them.

    A stage of a pipeline may fail alone, so that ranks of `parallelize` start for each way.
    """
    n_ranks = {way.name: way.n_ranks for way in WAYS}
    found, asked = dict[str, Outcome](), list(dict.fromkeys(asked))
    for n in sorted(set(n_ranks.values())):
        those = [one for one in asked if n_ranks[one.split(":", 1)[1]] == n]
        together = [one for one in those if one[0] not in PARTS]
        for each in (together, *([one] for one in those if one[0] in PARTS)):
            found |= _on_ranks(n, each) if each else {}
    return found


def _on_ranks(n_ranks: int, asked: list[str]) -> dict[str, Outcome]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        os.environ["REMAT_CACHE"] = cache
        if asked[0][0] in PARTS:
            make_plan(Path(folder), asked[0][0])
        try:
            torchrun(n_ranks, "tests/distributed/ways/worker.py", folder, *asked)
        except AssertionError as error:
            sys.stdout.write(f"{error}\n")
        ranks = [_told_by(Path(folder, f"{rank}.json")) for rank in range(n_ranks)]
    return {one: _of_ranks([each.get(one, _ENDED) for each in ranks]) for one in asked}


def _told_by(file: Path) -> dict[str, Outcome]:
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Outcome]) if file.exists() else {}


def _of_ranks(each: list[Outcome]) -> Outcome:
    """The worst; a rank that refuses ends the others."""
    return max(each, key=lambda one: (_WORST.index(one.verdict), one.ratio))


def page_lines(found: Mapping[str, Outcome]) -> list[str]:
    letters = _lettered(found)
    lines = [_row("", *COLUMNS.values()), _row(*["---"] * (len(COLUMNS) + 1))]
    for way in WAYS:
        cells = (found.get(f"{column}:{way.name}") for column in COLUMNS)
        lines.append(_row(way.name, *(_cell(one, letters) for one in cells)))
    notes = [_row(letter, text) for text, letter in letters.items()]
    return [*lines, "", _row("", "first words"), _row("---", "---"), *notes]


def _row(*entries: str) -> str:
    return f"|{'|'.join(entries)}|"


def _first_words(it: Outcome) -> str:
    return " ".join(it.text.split(" ")[:_WORDS]).replace("|", "/")


def _lettered(found: Mapping[str, Outcome]) -> dict[str, str]:
    """A letter for the first words of each refusal and warning."""
    texts = dict.fromkeys(_first_words(one) for one in found.values() if one.text)
    return dict(zip(texts, _LETTERS, strict=False))


def _cell(it: Outcome | None, letters: Mapping[str, str]) -> str:
    if it is None:
        return UNTRIED
    ratio = f"{it.ratio:.2f}" if it.ratio else ""
    note = f"<sup>{letters[_first_words(it)]}</sup>" if it.text else ""
    return f"{mark_of(it)}{ratio}{note}"


def mark_of(it: Outcome) -> str:
    return _MARKS.get(it.verdict, FAULT)


def marks_of(document: str) -> dict[str, str]:
    """What the page says of each column and way, without ratios and notes."""
    found: dict[str, str] = {}
    for line in document.splitlines():
        name, *cells = line.split("|")[1:-1] or [""]
        if len(cells) == len(COLUMNS):
            marks = (cell.partition("<")[0].rstrip("0123456789.") for cell in cells)
            found |= {f"{c}:{name}": mark for c, mark in zip(COLUMNS, marks, strict=True)}
    return {one: found[one] for one in everything()}


def main(asked: list[str]) -> int:
    """Try ways, and write the page if these are all."""
    found = outcomes(asked or everything())
    for name, one in found.items():
        sys.stdout.write(f"{name}: {one.verdict} {one.ratio or ''} {one.text}\n")
    if not asked:
        lines = page_lines(found)
        DOCS.write_text(replaced(DOCS.read_text(encoding="utf-8"), _MARKER, lines), "utf-8")
    return any(mark_of(one) == FAULT for one in found.values())
