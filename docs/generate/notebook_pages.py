"""The notebooks as pages, with what they showed when `make notebook-files` ran them.

Notebooks are text (`notebooks/*.py`); the `.ipynb` files beside them hold what they showed.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import nbformat
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "notebooks"


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs when it knows the pages that are written by hand."""
    for source in sorted(KEPT.glob("*.py")):
        body, pictures = notebook_page(source.with_suffix(".ipynb"))
        files.append(File.generated(config, f"notebooks/{source.stem}.md", content=body))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """The page of a notebook that was run, and its pictures by the names that it links to.

    Raises
    ------
    PluginError : it was not run.
    """
    if not path.exists():
        raise PluginError(f"{path.name} was not run: make notebook-files, then make docs")
    notebook = nbformat.read(path, as_version=4)
    said = {"unique_key": path.stem, "output_files_dir": PurePosixPath(f"{path.stem}_files")}
    exporter = MarkdownExporter(preprocessors=[CoalesceStreamsPreprocessor])
    body, resources = exporter.from_notebook_node(notebook, resources=said)
    source = f"*Made by running [`notebooks/{path.stem}.py`](../../notebooks/{path.stem}.py).*"
    title, _, rest = body.strip().partition("\n")
    return f"{title}\n\n{source}\n{rest}", resources["outputs"]
