"""Whether parts in pieces give eager's bits on the device at hand, at the shapes at hand.

Kernels for a block of rows may sum in another order than those for all rows. Which a library takes
hangs on shapes and on the device, so both ways run here once, on made data, and are compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from remat.graph_capture.prices.sample_inputs import price_key
from remat.graph_capture.splitting.activations import has_equal_blocks
from remat.graph_capture.splitting.head_loss import blocks
from remat.graph_capture.splitting.kinds import Part
from remat.graph_capture.splitting.made_inputs import made_inputs
from remat.graph_capture.splitting.mlp_ops import COLUMNS_MULTIPLE
from remat.graph_capture.splitting.mlps import Mlp
from remat.graph_capture.splitting.regions import Found

SEEN_NUMBERS, MOST_DRAWS = 1 << 22, 16
"""In 16 bits so many logits, or hidden activations, are compared, in at most so many draws."""

_Key = tuple[str, str, str, int, bool, int]
_known: dict[_Key, bool] = {}
"""What was found in this process, by graph in pieces, device, region, pieces, how and threads."""


def gives_eagers_bits(found: Found) -> bool | None:
    """Whether parts in the pieces that they are set to give the same bits as their own nodes.

    It takes the memory of four times the logits, or what an MLP holds. Where that runs out, the
    answer is None. Of parts that are alike, one is compared.
    """
    alike = {likeness(*pair): pair for pair in zip(found.parts, found.nodes, strict=True)}
    try:
        return all(_are_same_bits(*pair) for pair in alike.values())
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


def likeness(part: Part, nodes: Sequence[fx.Node]) -> str:
    """What decides which kernels run, whole and in pieces: shapes, strides, dtypes and scalars."""
    return "\n".join(price_key(node) for node in (*part.forward, *part.backward, *nodes))


def note_bits(found: Found, is_same: bool) -> None:
    """Keep in this process whether a region in the pieces that it is set to gives eager's bits."""
    device = str(found.parts[0].ends[0].meta["val"].device)
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


def _are_same_bits(part: Part, nodes: Sequence[fx.Node]) -> bool:
    if isinstance(part, Mlp) and not _has_equal_blocks(part, cast("int", nodes[0].args[-1])):
        return False
    return all(_are_same_once(part, nodes, seed) for seed in range(_draws(part)))


def _draws(part: Part) -> int:
    """How often to compare: another order of sums seldom shows in 16 bits of few numbers."""
    like: Tensor = (part.gate.product if isinstance(part, Mlp) else part.product).meta["val"]
    if like.dtype.itemsize >= torch.float32.itemsize:
        return 1
    return min(max(SEEN_NUMBERS // max(like.numel(), 1), 1), MOST_DRAWS)


def _are_same_once(part: Part, nodes: Sequence[fx.Node], seed: int) -> bool:
    made = made_inputs(part, seed)
    expected = _run_captured(part, [*part.forward, *part.backward], dict(made))
    found = _run_pieces(nodes, dict(made))
    return all(torch.equal(value, found[name]) for name, value in expected.items() if name in found)


def _has_equal_blocks(mlp: Mlp, pieces: int) -> bool:
    """Whether no element of the hidden activation hangs on how large its block is."""
    like: Tensor = mlp.gate.product.meta["val"]
    rows, columns = like.shape
    sizes = {(b - a) * columns for a, b in blocks(rows, pieces)}
    sizes |= {(b - a) * rows for a, b in blocks(columns, pieces, COLUMNS_MULTIPLE)}
    return has_equal_blocks(mlp.activation, like, [rows * columns, *sizes])


def _run_captured(
    part: Part, nodes: Sequence[fx.Node], known: dict[fx.Node, Tensor]
) -> dict[str, Tensor]:
    """Run nodes of the captured graph with what they read; their results by name."""
    results = _Results(known)
    order = {node: i for i, node in enumerate(nodes[0].graph.nodes)}
    for node in sorted(nodes, key=order.__getitem__):
        results[node]
    return {node.name: results[node] for node in part.ends}


class _Results(dict[fx.Node, Any]):
    """By node, each computed when first asked for.

    No function that calls itself: one refers to itself, so that what it has seen would live on
    until Python collects garbage.
    """

    def __missing__(self, node: fx.Node) -> Any:
        target: Any = node.target
        args = fx.map_arg(node.args, self.__getitem__)
        self[node] = target(*args, **fx.map_arg(node.kwargs, self.__getitem__))
        return self[node]


def _run_pieces(nodes: Sequence[fx.Node], known: dict[fx.Node, Tensor]) -> dict[str, Tensor]:
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
