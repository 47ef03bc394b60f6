"""Makes links to files outside `docs/` work on the site as they do in a repository's browser.

Such links are written for a repository's browser. On the site, a file gets a page that shows it,
and a folder one that lists its modules with their first lines. CONTRIBUTING.md and CHANGELOG.md
become pages too, and notebooks have theirs. So `mkdocs build --strict` can check every link.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the site that lie beside `docs/`, and their names there."""
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", "": "make"}

_LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs when it knows the pages: add those that they link to."""
    for path, uri in ROOT_PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    linked = dict.fromkeys(
        path
        for file in files.documentation_pages()
        for path in outward_links(file.content_string, repository_path(file.src_uri))
    )
    for path in linked:
        files.append(File.generated(config, site_uri(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page: point links at the site's pages."""
    here = repository_path(page.file.src_uri)

    def pointed(link: re.Match[str]) -> str:
        path = _target(link[2], here)
        if not _is_ours(path):
            return link[0]
        uri = posixpath.relpath(site_uri(path), posixpath.dirname(page.file.src_uri) or ".")
        return f"{link[1]}{uri}{link[3]}"

    return _LINK.sub(pointed, markdown)


def outward_links(markdown: str, here: str) -> list[str]:
    """Paths from the root of what the page at `here` links to outside of the site."""
    paths = (_target(link[2], here) for link in _LINK.finditer(markdown))
    return [path for path in paths if _is_ours(path) and site_uri(path).startswith("repository/")]


def repository_path(uri: str) -> str:
    """Where a page of the site lies, from the root of the repository."""
    named = {site: path for path, site in ROOT_PAGES.items()}
    return named.get(uri, f"docs/{uri}")


def site_uri(path: str) -> str:
    """The page of the site for a path from the root of the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("notebooks/") and path.endswith(".ipynb"):
        return f"{path.removesuffix('.ipynb')}.md"
    return ROOT_PAGES.get(path, f"repository/{path.rstrip('/')}.md")


def _target(link: str, here: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(here), link))


def _is_ours(path: str) -> bool:
    return not path.startswith(("/", "..")) and (ROOT / path).exists()


def shown(path: str) -> str:
    """A page that shows a file, or lists a folder."""
    found = ROOT / path
    if found.is_dir():
        return f"# {path}\n\n" + "\n".join(map(_line, sorted(found.glob("*.py"))))
    language = LANGUAGES.get(found.suffix, "text")
    return f"# {path}\n\n````{language}\n{found.read_text()}````\n"


def _line(module: Path) -> str:
    documentation = ast.get_docstring(ast.parse(module.read_text())) or ""
    return f"- `{module.name}`: {documentation.partition(chr(10))[0]}".rstrip(": ")
