"""Weights that autocast casts for several uses: once, as in eager.

Eager caches the cast until the outermost region ends, and adds up the uses' gradients in the lower
precision. A trace casts at each use and adds in the higher one, with other last bits. Here the
casts become one, and the sum moves before the cast of its result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Op
from remat.graph_capture.joint.nodes import aten, is_view, made_by_autograd
from remat.graph_capture.joint.provenance import CASTS_KEY, FUNCTION_KEY, path_in_model

_EXPLICIT_CASTS = ("to", "type", "half", "bfloat16", "float", "double", "type_as")
_KEPT_BY_AUTOCAST = ("ParamAOTInput", "PlainAOTInput")


def cast_weights_once(gm: fx.GraphModule) -> None:
    """CaptureError if eager's order of adding up a gradient cannot be told, or is that of an input
    of the step, which eager casts once only if it is a leaf."""
    weights = gm.graph.find_nodes(op="placeholder")
    repeated = [(weight, casts) for weight in weights for casts in _repeated(weight)]
    if not repeated:  # making code of the graph anew takes long for thousands of nodes
        return
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    back: dict[Any, list[fx.Node]] = {}  # backward of each cast; none without gradient
    for node in gm.graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if made_by_autograd(node):
            back.setdefault(_made_as(node), []).append(node)
    for weight, casts in repeated:
        _share(gm.graph, weight, sorted(casts, key=order.__getitem__), back, order)
    gm.recompile()


def _repeated(weight: fx.Node) -> Iterator[list[fx.Node]]:
    """Casts of one weight that eager makes once."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in weight.users:
        if _is_cast_of_weight(node):
            region = node.meta["custom"][CASTS_KEY]
            groups.setdefault((region, str(node.kwargs)), []).append(node)
    yield from (casts for casts in groups.values() if len(casts) > 1)


CachedCast = tuple[list[str], int]  # values that are one in the cache, and who last finds it


def cached_casts(ops: Sequence[Op], node_of_op: Mapping[str, fx.Node]) -> Iterator[CachedCast]:
    end, same = dict[str, int](), dict[tuple[fx.Node, str, str], list[str]]()
    for i, op in enumerate(ops):
        node = node_of_op.get(op.name)
        region = _custom(node).get(CASTS_KEY) if node and op.phase == "forward" else None
        if node is None or region is None:
            continue
        end[region] = i
        if _is_cast_of_weight(node):
            key = (node.all_input_nodes[0], region, str(node.kwargs))
            same.setdefault(key, []).append(op.outputs[0])
    for (_, region, _), values in same.items():
        yield values, end[region]


def _is_cast_of_weight(node: fx.Node) -> bool:
    """Whether autocast makes the node and keeps its result, if its input is trained."""
    source = node.args[0] if node.args else None
    if node.target is not aten._to_copy.default or not isinstance(source, fx.Node):
        return False
    kind = type(source.meta.get("desc")).__name__
    # `cached_cast` in torch's autocast_mode.cpp keeps casts of float32 leaves only.
    is_float = getattr(source.meta.get("val"), "dtype", None) == torch.float32
    is_explicit = _custom(node).get(FUNCTION_KEY) in _EXPLICIT_CASTS
    is_kept = kind in _KEPT_BY_AUTOCAST and is_float and not is_explicit
    return is_kept and _custom(node).get(CASTS_KEY) is not None


def _custom(node: fx.Node) -> dict[str, Any]:
    return node.meta.get("custom") or {}


def _share(
    graph: fx.Graph, weight: fx.Node, casts: list[fx.Node], back: Mapping[Any, list[fx.Node]],
    order: Mapping[fx.Node, int],
) -> None:  # fmt: skip
    ends = dict.fromkeys(end for cast in casts for end in back.get(_made_as(cast), ()))
    if not ends:  # autocast keeps only casts of what is trained
        return
    if len(ends) > 1:
        chain = _chain_of(ends)
        if type(weight.meta["desc"]).__name__ != "ParamAOTInput" or chain is None:
            raise _refused(weight, casts)
        # The one cast was made before its first use: as a rule its backward runs after all others.
        own = [order[_gradient(term)] for term in chain.terms if term in ends]
        is_alone = len(ends) == len(chain.terms)
        last = next(term for term in reversed(chain.terms) if term in ends)
        if not (own == sorted(own) and (is_alone or last in back.get(_made_as(casts[0]), ()))):
            raise _refused(weight, casts)
        _add_before_the_cast(graph, chain, ends)
    for cast in casts[1:]:
        cast.replace_all_uses_with(casts[0])
        graph.erase_node(cast)
    _let_views_share(casts[0])


def _let_views_share(node: fx.Node) -> None:
    for view in node.users:  # views of the other casts had the storage of those, which are gone now
        if is_view(view):
            args, kwargs = fx.map_arg((view.args, view.kwargs), lambda n: n.meta["val"])
            view.meta["val"] = view.target(*args, **kwargs)  # pyright: ignore
            _let_views_share(view)


def _made_as(cast: fx.Node) -> tuple[Any, ...]:
    """What a cast has in common with its backward: autograd's number of it, and the shape."""
    return cast.meta.get("seq_nr"), tuple(cast.meta["val"].shape)


@dataclass(frozen=True)
class _Chain:
    """A gradient as autograd adds it up: `terms` in order, and the addition that each joins."""

    terms: tuple[fx.Node, ...]
    joins: tuple[fx.Node, ...]  # the first two terms join the same one


def _chain_of(ends: Collection[fx.Node]) -> _Chain | None:
    """The additions that `ends` are part of; None if they are not one chain."""
    additions: dict[fx.Node, None] = {}
    for end in ends:
        node = end
        while (addition := _only_addition(node)) is not None and addition not in additions:
            additions[addition] = None
            node = addition
    first = [a for a in additions if not any(arg in additions for arg in a.args)]
    if len(first) != 1 or first[0].args[0] is first[0].args[1]:
        return None
    terms, joins, total = list(first[0].all_input_nodes), [first[0]] * 2, first[0]
    while (addition := _only_addition(total)) is not None:
        before, term = addition.all_input_nodes
        if before is not total:
            return None
        terms.append(term)
        joins.append(addition)
        total = addition
    return _Chain(tuple(terms), tuple(joins)) if set(ends) <= set(terms) else None


def _only_addition(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    if len(users) != 1 or users[0].target is not aten.add.Tensor or users[0].kwargs:
        return None
    return users[0] if len(users[0].all_input_nodes) == len(users[0].args) == 2 else None


def _gradient(end: fx.Node) -> fx.Node:
    source = end.args[0]
    assert isinstance(source, fx.Node)
    return source


def _add_before_the_cast(graph: fx.Graph, chain: _Chain, ends: Collection[fx.Node]) -> None:
    """Add up what `ends` cast, cast the sum in the place of the last one, and add the others."""
    left, low, high = len(ends), None, None
    for term, join in zip(chain.terms, chain.joins, strict=True):
        with graph.inserting_before(join):
            if term not in ends:
                high = _added(graph, high, term, join)
                continue
            low, left = _added(graph, low, _gradient(term), join), left - 1
            if not left:
                node = graph.call_function(aten._to_copy.default, (low,), dict(term.kwargs))
                node.meta = {**term.meta, "val": low.meta["val"].to(term.meta["val"].dtype)}
                high = _added(graph, high, node, join)
    total = chain.joins[-1]
    assert high is not None
    total.replace_all_uses_with(high)
    for addition in reversed(dict.fromkeys(chain.joins)):
        graph.erase_node(addition)
    for end in ends:
        graph.erase_node(end)


def _added(graph: fx.Graph, total: fx.Node | None, term: fx.Node, like: fx.Node) -> fx.Node:
    if total is None:
        return term
    node = graph.call_function(aten.add.Tensor, (total, term))
    node.meta = {**like.meta, "val": total.meta["val"] + term.meta["val"]}
    return node


def _refused(weight: fx.Node, casts: list[fx.Node]) -> CaptureError:
    what = weight.meta["desc"]
    if type(what).__name__ == "ParamAOTInput":
        name = f"parameter {path_in_model(str(what.target))}"
        reason = "adds up its gradients in an order that a trace does not show"
    else:
        name = f"{weight.name}, an input that requires grad,"
        reason = "does so only where no other module has made it"
    return CaptureError(
        "train and capture under torch.autocast(..., cache_enabled=False), where eager casts at "
        f"each use: {name} is cast {len(casts)} times under autocast.\n"
        f"Eager casts it once and {reason}"
    )
