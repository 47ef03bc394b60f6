"""The fields of `Request` are the planning options of every verb that plans."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import click
import pytest
import typer.main

from remat.cli.main import app
from remat.cli.verb import ADVANCED_PANEL, PANEL
from remat.job.request import Request
from tests.remat.cli.conftest import Remat

VERBS = ("run", "solve", "inspect", "sweep", "compare", "explain", "fit", "report", "export")


def planning_options(verb: str) -> dict[str, tuple[Any, ...]]:
    """Flags, help and metavar of each planning option, by the name of its field."""
    group = typer.main.get_command(app)
    command = group.get_command(click.Context(click.Command("remat")), verb)  # type: ignore[attr-defined]
    return {
        one.name: (one.opts, one.help, one.metavar)
        for one in command.params
        if getattr(one, "rich_help_panel", None) in (PANEL, ADVANCED_PANEL)
    }


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_that_plans_has_the_fields_of_the_request_with_their_help(verb: str) -> None:
    fields = {field.name: field.metadata["help"] for field in dataclasses.fields(Request)}
    assert {name: help for name, (_, help, _) in planning_options(verb).items()} == fields
    assert planning_options(verb) == planning_options("run")


def test_what_only_captures_has_the_options_of_a_capture() -> None:
    found = planning_options("capture")
    assert "budget" not in found
    assert found.items() <= planning_options("run").items()


@pytest.mark.parametrize("verb", ["sweep", "compare"])
def test_budgets_are_named_one_by_one_or_together(remat: Remat, verb: str) -> None:
    words = (verb, "no_such_file.py:factory", "--budget", "60%")
    twice = remat(*words, "--budgets", "70%")
    assert twice.exit_code == 2
    assert "name budgets by --budget or by --budgets 70%, not by both" in twice.stderr
    bad = remat(*words, "--budget", "8 gigs")
    assert bad.exit_code == 2
    assert "unknown unit 'gigs'" in bad.stderr


def test_no_option_shows_a_default_that_stands_for_another(remat: Remat) -> None:
    group = typer.main.get_command(app)
    for verb in group.commands:  # type: ignore[attr-defined]
        assert not re.search(r"default: 0(?!\.)", remat(verb, "--help").stdout), verb
    said = " ".join(remat("plan-cluster", "--help").stdout.replace("│", "").split())
    assert said.count("(required with a model)") == 3
