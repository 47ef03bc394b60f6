"""The repeated blocks of a network, found from the module paths of its forward ops.

The rule: an integer component of a module path numbers the entries of the container that
the path before it names. ``blocks.0.attn`` and ``blocks.1.mlp`` make ``blocks`` a container
of two entries. A block is an entry of an outermost container with at least two entries in
use. So a `Sequential` inside a block makes none, and a net that keeps its blocks in several
containers (``down.0``, ``up.0``) has those of all. An op without a module, which the model's
own forward runs, takes the block before it if a block also follows it; other ops have none.

Blocks are found in two ways, on purpose. Templates go by module paths, since people wrap
modules in checkpoints. `hierarchical` goes by structure (`blocks/repeated`), since a graph
need not have module names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from remat.graph_capture.graph import TrainingGraph

NO_BLOCK = -1
NO_REPEATED_BLOCK = (
    "no repeated block: the template does not apply. A block is a numbered entry of a module "
    "list, as blocks.0 and blocks.1 are"
)


class Blocks(NamedTuple):
    """The blocks of a graph, in order of their first op.

    Attributes
    ----------
    of_op : block of each forward op, `NO_BLOCK` for ops outside.
    names : module path of each block. container : number of the container of each block.
    rank : position of each block among those of its container, from 0.
    """

    of_op: list[int]
    names: list[str]
    container: list[int]
    rank: list[int]


def module_blocks(graph: TrainingGraph) -> Blocks:
    """The blocks of `graph`; `names` is empty where nothing repeats."""
    modules = [op.module for op in graph.ops[: graph.n_forward]]
    entries = _entries(modules)
    blocks = Blocks([], [], [], [])
    number: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for module in modules:
        container, entry = _outermost(module, entries)
        name = f"{container}.{entry}".removeprefix(".")
        if entry and name not in number:
            number[name] = len(number)
            blocks.names.append(name)
            blocks.rank.append(sizes.setdefault(container, 0))
            blocks.container.append(list(sizes).index(container))
            sizes[container] += 1
        blocks.of_op.append(number[name] if entry else NO_BLOCK)
    _adopt(blocks.of_op, modules)
    return blocks


def _entries(modules: Sequence[str]) -> dict[str, set[str]]:
    """The integers that follow each path."""
    entries: dict[str, set[str]] = {}
    for module in dict.fromkeys(modules):
        parts = module.split(".")
        for i, part in enumerate(parts):
            if part.isdigit():
                entries.setdefault(".".join(parts[:i]), set()).add(part)
    return entries


def _outermost(module: str, entries: dict[str, set[str]]) -> tuple[str, str]:
    """Container and entry that `module` lies in; two empty texts if it lies in none."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        container = ".".join(parts[:i])
        if part.isdigit() and len(entries[container]) > 1:
            return container, part
    return "", ""


def _adopt(of_op: list[int], modules: Sequence[str]) -> None:
    """Give ops without a module, between ops in blocks, the block before them."""
    following = [NO_BLOCK] * len(of_op)
    after = NO_BLOCK
    for i in reversed(range(len(of_op))):
        following[i] = after
        if modules[i]:
            after = of_op[i]
    before = NO_BLOCK
    for i, module in enumerate(modules):
        if module:
            before = of_op[i]
        elif following[i] != NO_BLOCK:
            of_op[i] = before
