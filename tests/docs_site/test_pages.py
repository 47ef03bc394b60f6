"""What the hooks of the docs site make of headers, docstrings and links.

They need the extra ``docs``; `make docs` runs them before it builds.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remat.solver import TABLE

ROOT = Path(__file__).parents[2]

NEEDS = "the extra docs: make docs"

(
    command_page, docstrings, no_network, notebook_pages, package_tree, repository_links,
    solver_pages,
) = (
    pytest.importorskip(f"docs.generate.{name}", reason=NEEDS)
    for name in (
        "command_page", "docstrings", "no_network", "notebook_pages", "package_tree",
        "repository_links", "solver_pages",
    )
)  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_every_solver_is_on_the_page_with_its_header(name: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="solvers.md"))
    text = solver_pages.on_page_markdown(f"| `{name}` | does |", page)
    assert text.startswith(f"| [`{name}`](#{name}) | does |")
    part = text.partition(f"\n\n### {name}\n\n**")[2].partition("\n\n### ")[0]
    assert all(f"\n\n**{label}**" in part for label in ("Solves", "Cost", "Shortcomings"))
    path = re.search(r"File: `([\w/]+\.py)`", part)
    assert path is not None
    assert (ROOT / path[1]).is_file()


def test_labels_open_paragraphs_and_addresses_become_links() -> None:
    text = "Paper: one, https://a.b/c.\nSolves: nothing. Cost: O(n). Optimal only here."
    assert solver_pages.labelled(text) == (
        "**Paper**: one, <https://a.b/c>.\n\n**Solves**: nothing.\n\n**Cost**: O(n).\n\n"
        "**Optimal** only here."
    )


def test_sections_of_docstrings_become_lists() -> None:
    text = """Solve.

    Parameters
    ----------
    keep, recompute : globs over
        module paths.
    graph : TrainingGraph. solver : a name of
        the table. target, loss_fn : as they come.

    Raises
    ------
    SolverError : no such solver.
    """
    assert docstrings.as_markdown(text) == (
        "Solve.\n\n**Parameters**\n\n- `keep, recompute`: globs over\n  module paths.\n"
        "- `graph`: TrainingGraph.\n- `solver`: a name of\n  the table.\n"
        "- `target, loss_fn`: as they come.\n\n**Raises**\n\n- `SolverError`: no such solver."
    )


def test_every_verb_is_on_the_page_of_the_command_line() -> None:
    from remat.cli.main import VERBS

    page = command_page.command_page()
    assert VERBS
    assert all(f"## `remat {verb}`" in page for verb in VERBS)


def test_links_out_of_the_docs_point_at_pages_that_show_the_files() -> None:
    text = (
        "[a](../graph_capture/devices/devices.json) [b](files.md#plans) [c](https://d.e) "
        "[f](../tests)"
    )
    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/a.md"))
    page_of_root = SimpleNamespace(file=SimpleNamespace(src_uri="models.md"))
    assert repository_links.on_page_markdown(text, page_of_root) == (
        "[a](repository/graph_capture/devices/devices.json.md) [b](files.md#plans) "
        "[c](https://d.e) [f](repository/tests.md)"
    )
    deeper = repository_links.on_page_markdown("[a](../../README.md) [b](../faq.md)", page)
    assert deeper == "[a](../index.md) [b](../faq.md)"
    assert '"h100"' in repository_links.shown("graph_capture/devices/devices.json")
    assert "- `gpt.py`: A small GPT with dropout" in repository_links.shown("examples")


def test_a_page_that_would_fetch_from_elsewhere_is_found() -> None:
    good = '<a href="https://a.b"><img src="c.png"><link rel="stylesheet" href="d.css">'
    assert no_network.fetched(good) == []
    bad = ('<script src="https://a.b/c.js">', '<link rel="stylesheet" href="//fonts.b/c.css">')
    assert [no_network.fetched(tag) != [] for tag in bad] == [True, True]


def test_search_runs_its_worker_from_disk(tmp_path: Path) -> None:
    from mkdocs.config import load_config

    browser = shutil.which("chromium") or pytest.skip("chromium is not installed")
    config = load_config(str(ROOT / "mkdocs.yml"))
    assert "material/offline" in config.plugins
    (polyfill,) = config.extra["polyfills"]
    (tmp_path / "worker.js").write_text("onmessage = (asked) => postMessage(asked.data + 1)")
    (tmp_path / "page.html").write_text(
        f"<body><script>{(ROOT / 'docs' / polyfill).read_text()}</script><script>"
        "const worker = new Worker('worker.js'); worker.postMessage(41);"
        "worker.addEventListener('message', (told) => document.title = told.data)</script>"
    )
    flags = ("--headless", "--no-sandbox", "--virtual-time-budget=2000", "--dump-dom")
    page = (tmp_path / "page.html").as_uri()
    done = subprocess.run([browser, *flags, page], capture_output=True, text=True, check=True)
    assert "<title>42</title>" in done.stdout


def test_a_notebook_that_was_not_run_is_named(tmp_path: Path) -> None:
    from mkdocs.exceptions import PluginError

    with pytest.raises(PluginError, match=r"1_first_plan\.ipynb was not run: make notebook-files"):
        notebook_pages.notebook_page(tmp_path / "1_first_plan.ipynb")


def test_a_notebooks_outputs_are_on_its_page(tmp_path: Path) -> None:
    cell = {
        "cell_type": "code", "id": "a", "execution_count": 1, "metadata": {}, "source": "6 * 7",
        "outputs": [{
            "output_type": "execute_result", "execution_count": 1, "metadata": {},
            "data": {"text/plain": "42"},
        }],
    }  # fmt: skip
    title = {"cell_type": "markdown", "id": "b", "metadata": {}, "source": "# A title"}
    notebook = {"cells": [title, cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path = tmp_path / "try.ipynb"
    path.write_text(json.dumps(notebook))
    body, _ = notebook_pages.notebook_page(path)
    assert body.startswith("# A title\n\n*Made by running")
    assert "6 * 7" in body
    assert "42" in body


def test_the_tree_of_packages_has_every_module(tmp_path: Path) -> None:
    package_tree.copy_packages(tmp_path / "tree")
    copied = {path.relative_to(tmp_path / "tree") for path in (tmp_path / "tree").rglob("*.py")}
    names = ("graph_capture", "rewriter", "schedules", "solver")
    parts = {Path("remat", path.relative_to(ROOT)) for name in names for path in _modules(name)}
    assert copied == parts | {path.relative_to(ROOT) for path in _modules("remat")}


def _modules(folder: str) -> list[Path]:
    return list((ROOT / folder).rglob("*.py"))


def test_every_page_that_is_written_by_hand_is_in_the_navigation() -> None:
    from mkdocs.config import load_config

    nav = load_config(str(ROOT / "mkdocs.yml")).nav
    listed = set(_pages(nav))
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert written <= listed
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.py")}
    assert notebooks <= listed


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    entries = nav if isinstance(nav, list) else nav.values()
    return [page for entry in entries for page in _pages(entry)]
