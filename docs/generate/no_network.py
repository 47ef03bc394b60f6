"""Fails the build where a page would fetch a script, style, font or picture from elsewhere.

Pages are read without a network, so they use no fonts or scripts of other hosts, and no mermaid,
which the theme would fetch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_ELSEWHERE = r"""["']?(?:https?:)?//[^"' >]+"""
_FETCHED = re.compile(
    rf"""<(?:script|img|iframe|source)\b[^>]*\bsrc={_ELSEWHERE}"""
    rf"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preconnect|preload))[^>]*\bhref={_ELSEWHERE}"""
)


def on_post_build(config: Any) -> None:
    """Called by mkdocs when the site is written."""
    site = Path(config.site_dir)
    for page in sorted(site.rglob("*.html")):
        found = fetched(page.read_text())
        if found:
            raise PluginError(f"{page.relative_to(site)} fetches {found[0]} over the network")


def fetched(html: str) -> list[str]:
    """The tags of a page that fetch from another host."""
    return _FETCHED.findall(html)
