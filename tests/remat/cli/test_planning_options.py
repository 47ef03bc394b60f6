"""The fields of `Request` are the planning options of every verb that plans."""

from __future__ import annotations

import re
from typing import Any

import click
import pytest
import typer.main

from remat.cli.main import app
from remat.cli.verb import FIELDS, MORE, OPTIONS
from tests.remat.cli.conftest import Remat

VERBS = ("run", "sweep", "largest-batch", "show", "report")
USUAL = ["--budget", "--device", "--host", "--optimizer", "--keep", "--time-limit", "--gap"]


def options(verb: str) -> list[Any]:
    group = typer.main.get_command(app)
    command = group.get_command(click.Context(click.Command("remat")), verb)  # type: ignore[attr-defined]
    return [one for one in command.params if one.param_type_name == "option"]


def planning_options(verb: str) -> dict[str, tuple[Any, ...]]:
    """Flags, help and metavar of each planning option, by the name of its field."""
    return {
        one.name: (one.opts, one.help, one.metavar) for one in options(verb) if one.name in FIELDS
    }


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_that_plans_has_the_fields_of_the_request_with_their_help(verb: str) -> None:
    assert planning_options(verb).keys() == FIELDS.keys() == OPTIONS["request"].keys()
    for name, (_, text, _) in planning_options(verb).items():
        assert text.startswith(OPTIONS["request"][name]["help"].partition("{")[0])
        assert "{" not in text
    assert planning_options(verb) == planning_options("run")


def test_each_row_of_the_table_is_an_option_of_a_verb() -> None:
    group = typer.main.get_command(app)
    shown = {
        verb.replace("-", "_"): {str(one.name) for one in command.params}
        for verb, command in group.commands.items()  # type: ignore[attr-defined]
    }
    for verb, rows in OPTIONS.items():
        known = shown.get(verb, set().union(*shown.values()))
        assert rows.keys() <= known, verb


def test_run_shows_the_ten_options_that_people_use_first() -> None:
    panels = {one.opts[0]: one.rich_help_panel for one in options("run")}
    first = [flag for flag, panel in panels.items() if panel is None]
    assert first == [*USUAL, "--output", "--json", "--verbose"]
    assert set(panels.values()) == {None, MORE}


def test_what_only_checks_has_the_options_of_a_trace() -> None:
    found = planning_options("check")
    assert list(found) == ["device", "optimizer", "accumulate"]
    assert found.items() <= planning_options("run").items()


@pytest.mark.parametrize("solvers", [(), ("--solver", "usual")])
def test_budgets_are_named_one_by_one_or_together(remat: Remat, solvers: tuple[str, ...]) -> None:
    words = ("sweep", "no_such_file.py:factory", *solvers, "--budget", "60%")
    twice = remat(*words, "--budgets", "70%")
    assert twice.exit_code == 2
    assert "give --budget or --budgets 70%, not both" in twice.stderr
    bad = remat(*words, "--budget", "8 gigs")
    assert bad.exit_code == 2
    assert "unknown unit 'gigs'" in bad.stderr


def test_no_option_shows_a_default_that_stands_for_another(remat: Remat) -> None:
    group = typer.main.get_command(app)
    for verb in group.commands:  # type: ignore[attr-defined]
        assert not re.search(r"default: 0(?!\.)", remat(verb, "--help").stdout), verb
    said = " ".join(remat("cluster", "--help").stdout.replace("│", "").split())
    assert said.count("(required with a model)") == 3
