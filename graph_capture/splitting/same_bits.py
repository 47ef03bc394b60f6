"""Whether a head in pieces gives eager's bits on the device at hand, at the shapes at hand.

Kernels for a block of rows may sum in another order than those for all rows. Which a library takes
hangs on shapes and on the device, so both ways run here once, on made data, and are compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from remat.graph_capture.splitting.heads import Head
from remat.graph_capture.splitting.regions import Found
from remat.graph_capture.splitting.smoothing import identity_of

aten = torch.ops.aten
IGNORED_PART = 0.1
"""Of the made targets: rows that the loss ignores."""
SEEN_LOGITS, MOST_DRAWS = 1 << 22, 16
"""In 16 bits so many logits are compared, in at most so many draws."""

_Key = tuple[str, str, str, int, bool, int]
_known: dict[_Key, bool] = {}
"""What was found in this process, by graph in pieces, device, region, pieces, how and threads."""


def gives_eagers_bits(found: Found) -> bool | None:
    """Whether a head in the pieces that it is set to gives the same bits as its own nodes.

    It takes the memory of four times the logits. Where that runs out, the answer is None.
    """
    try:
        pairs = zip(found.heads, found.nodes, strict=True)
        return all(_are_same_bits(*pair) for pair in pairs)
    except RuntimeError as error:  # of CUDA's allocator too
        if "memory" not in str(error):
            raise
        if found.is_asked:
            warnings.warn(
                f"whether {found.name} in {found.pieces} pieces gives eager's bits is unknown, as "
                "memory ran out: it stays whole",
                stacklevel=2,
            )
        return None


def note_bits(found: Found, is_same: bool) -> None:
    """Keep in this process whether a head in the pieces that it is set to gives eager's bits."""
    device = str(found.heads[0].x.meta["val"].device)
    facts = found.joint.graph.hash, device, found.name, found.pieces, found.is_exact
    _known[_fact(*facts)] = is_same


def is_known_to_give_them(graph_hash: str, device: str, region: str, pieces: int) -> bool:
    """Whether this process has found that a region in exact pieces gives eager's bits.

    `graph_hash` is that of the graph in pieces, which a plan is held to. It names no other graph,
    so a plan that was edited is compared too.
    """
    return _known.get(_fact(graph_hash, device, region, pieces, True), False)


def _fact(graph_hash: str, device: str, region: str, pieces: int, is_exact: bool) -> _Key:
    return graph_hash, device, region, pieces, is_exact, torch.get_num_threads()


def _are_same_bits(head: Head, nodes: Sequence[fx.Node]) -> bool:
    return all(_are_same_once(head, nodes, seed) for seed in range(_draws(head)))


def _draws(head: Head) -> int:
    """How often to compare: another order of sums seldom shows in 16 bits of few numbers."""
    x, weight = head.x.meta["val"], head.weight.meta["val"]
    if x.dtype.itemsize >= torch.float32.itemsize:
        return 1
    n_logits = max(x.numel() // x.shape[-1] * weight.shape[0], 1)
    return min(max(SEEN_LOGITS // n_logits, 1), MOST_DRAWS)


def _are_same_once(head: Head, nodes: Sequence[fx.Node], seed: int) -> bool:
    made = _made_inputs(head, seed)
    expected = _run_captured(head, [*head.forward, *head.backward], dict(made))
    found = _run_pieces(head, nodes, dict(made))
    return all(torch.equal(value, found[name]) for name, value in expected.items() if name in found)


def _made_inputs(head: Head, seed: int) -> dict[fx.Node, Tensor]:
    """Random data for what the head reads. The user's random stream stays where it is."""
    target: Any = head.loss.args[1]
    at: Tensor = target.meta["val"]
    with torch.random.fork_rng([at.device] if at.is_cuda else []):
        torch.manual_seed(seed)
        row_term = head.smoothing.row_term if head.smoothing else None
        read = (head.x, head.weight, head.bias, head.gradient, row_term)
        made = {node: _normal(node) for node in read if node is not None}
        chosen = torch.randint(head.weight.meta["val"].shape[0], at.shape, device=at.device)
        is_ignored = torch.rand(at.shape, device=at.device) < IGNORED_PART
        made[target] = chosen.masked_fill_(is_ignored, cast("int", head.loss.args[4]))
        class_weight = head.loss.args[2]
        if isinstance(class_weight, fx.Node):
            # Several nodes of the head read the same constant by nodes of their own.
            same = [class_weight, *_constants_alike(head, class_weight)]
            made |= dict.fromkeys(same, _normal(class_weight).abs())
    return made


def _constants_alike(head: Head, constant: fx.Node) -> list[fx.Node]:
    """Nodes that the head reads and that stand for the same tensor."""
    read = (one for node in (*head.forward, *head.backward) for one in node.all_input_nodes)
    return [one for one in read if identity_of(one) == identity_of(constant)]


def _normal(node: fx.Node) -> Tensor:
    like: Tensor = node.meta["val"]
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.normal_()


def _run_captured(
    head: Head, nodes: Sequence[fx.Node], known: dict[fx.Node, Tensor]
) -> dict[str, Tensor]:
    """Run nodes of the captured graph with what they read; their results by name."""
    results: dict[fx.Node, Any] = dict(known)

    def value(node: fx.Node) -> Any:
        if node not in results:
            target: Any = node.target
            args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
            results[node] = target(*args, **kwargs)
        return results[node]

    order = {node: i for i, node in enumerate(head.loss.graph.nodes)}
    for node in sorted(nodes, key=order.__getitem__):
        value(node)
    row_sum = head.smoothing.row_sum if head.smoothing else None
    ends = [head.of_x, head.of_weight, head.of_bias, row_sum, *head.loss.users]
    return {node.name: results[node] for node in ends if node is not None}


def _run_pieces(
    head: Head, nodes: Sequence[fx.Node], known: dict[fx.Node, Tensor]
) -> dict[str, Tensor]:
    """Run the ops of ours on the same data; their results by name."""
    data = {node.name: tensor for node, tensor in known.items()}
    for node in nodes:
        target: Any = node.target
        result = target(*fx.map_arg(node.args, lambda read: data[read.name]))
        if isinstance(result, Tensor):
            data[node.name] = result
        else:
            for user in node.users:
                data[user.name] = result[cast("int", user.args[1])]

    return data
