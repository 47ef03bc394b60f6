"""The page against published tables is what the kept results say."""

from __future__ import annotations

import re

from benchmarks.papers.page import PAGE, kept_lines, text_of
from benchmarks.papers.published import JOBS


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text() == text_of(kept_lines())


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


def test_each_table_has_its_rows_and_names_its_source() -> None:
    text = PAGE.read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| .*%", line)]
    assert len(rows) == len(kept_lines())
    assert all("\nSource: [" in part and "](http" in part for part in text.split("\n## ")[1:])


def test_the_page_says_that_ours_are_modelled() -> None:
    assert "**All of ours are modelled; nothing was\nrun.**" in PAGE.read_text()
