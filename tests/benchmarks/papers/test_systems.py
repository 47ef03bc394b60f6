"""The page of systems is what the kept results say, and what it names is there."""

from __future__ import annotations

import inspect
import re
from operator import attrgetter
from typing import Any

import pytest
import typer

import remat
from benchmarks.papers.published import JOBS
from benchmarks.papers.systems import KINDS, PAGE, kept_lines, parts, text_of
from remat.cli.main import app
from remat.solver import TABLE
from tests.paths import ROOT

ROWS = [tuple(row) for part in parts() for row in part["rows"]]
NAMES = """
Chen revolve rotor Checkmate Kusumoto TWRemat Feng MOCCASIN FastSA Rockmate HiRemate OffMate
MONeT XEngine POET MAGIS Korthikanti DistFlashAttn LoongTrain Yuan activation_memory_budget SAC
sac_ilp auto_perf_maxing JAX XLA torch_remat every_n_layers DTR MegTaiChi Coop DELTA TACO Capuchin
SuperNeurons ZeRO FSDP ZeRO++ MiCS PaRO RTP AMSP Lynx AdaPipe Mario PipeOffload ROAM OLLA/MODeL
Imanishi MiniMalloc idealloc STAlloc GMLake expandable ZeRO-Offload L2L Elixir PatrickStar
STRONGHOLD Harmony Mobius TSPLIT TMOF ZeRO-Infinity Angel-PTM Smart-Infinity Fuyou MoESys TERAIO
jax.checkpoint tf.recompute_grad checkpoint_sequential PEFT
"""
"""Systems that have to have a row."""
VERBS: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
ENDS = re.compile(r"works(?:$|[,:]? )|priced only: .|obsolete: .")


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text() == text_of(kept_lines())


@pytest.mark.parametrize("name", NAMES.split())
def test_each_system_has_one_row_that_says_how_it_ends(name: str) -> None:
    found = [row for row in ROWS if name in re.split(r"[ ,()']+", row[0])]
    assert len(found) >= 1
    assert all(ENDS.match(row[-1]) for row in found)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_a_row_names_is_there(row: tuple[str, ...]) -> None:
    names = re.findall("`([^`]+)`", row[1] + row[-1])
    assert names
    assert [name for name in names if not is_there(name)] == []
    kind, _, of = row[2].partition(" ")
    assert kind in {*KINDS, "-"}
    assert kind != "tested" or (ROOT / of).is_file()
    assert row[-1].startswith(("works", "priced", "obsolete"))
    assert kind != "-" or not row[-1].startswith("works")  # what works shows a figure


def test_a_name_that_is_not_there_is_found() -> None:
    wrong = ("chen", "--mikrobatches", "remat.Plan.places", "budgets=", "remat plan MODEL",
             "remat cluster MODEL --sp 8", "python -m benchmarks.none")  # fmt: skip
    assert not any(map(is_there, wrong))


def is_there(name: str) -> bool:
    """Whether it is a solver, an option, a command, a name or a parameter of `remat`."""
    first, *rest = name.split()
    options = [word for word in name.split() if word.startswith("--")]
    if first == "python":
        path = ROOT / rest[1].replace(".", "/")
        return path.with_suffix(".py").is_file() or path.is_dir()
    if first == "remat" or first.startswith("--"):
        verbs = list(VERBS.values()) if first != "remat" else [VERBS.get(rest[0])]
        known = {opt for verb in verbs if verb for one in verb.params for opt in one.opts}
        return bool(known) and known.issuperset(options)
    if first.startswith("remat."):
        try:
            return attrgetter(first.removeprefix("remat."))(remat) is not None
        except AttributeError:
            return False
    if "=" in first:
        taken = [inspect.signature(one).parameters for one in (remat.rematerialize, remat.Sharding)]
        return any(first.partition("=")[0] in one for one in taken)
    return first in TABLE


def test_every_published_figure_is_kept() -> None:
    kept = {(line.job, line.name, line.by, line.published) for line in kept_lines()}
    assert kept == {
        (job.name, one.name, one.by, one.overhead) for job in JOBS for one in job.figures
    }


def test_no_line_beats_its_bound_or_the_budget() -> None:
    for line in kept_lines():
        assert all((line.date, line.commit, line.versions))
        if line.overhead is not None:
            assert line.overhead >= line.bound_overhead - 1e-9
            assert line.gap is not None
            assert line.gap >= 0
        if line.overhead is not None and line.policy_overhead is not None:
            assert line.overhead <= line.policy_overhead + 1e-9


def test_each_published_row_is_shown_and_each_source_named() -> None:
    text = PAGE.read_text().partition("## Published tables")[2]
    assert len(re.findall(r"^\|.*%", text, re.M)) == len(kept_lines())
    assert all(job.source in text for job in JOBS)
    assert "**All of ours are modelled; nothing was run**" in text
