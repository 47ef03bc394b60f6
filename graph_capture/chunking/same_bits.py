"""Whether parts in chunks give eager's bits on the device at hand, at the shapes at hand.

Which kernel a library takes hangs on both, so both ways run here once, on made data.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from remat.graph_capture.chunking.blocks import blocks
from remat.graph_capture.chunking.head import Head, identity_of
from remat.graph_capture.chunking.mlp import Mlp, has_equal_blocks
from remat.graph_capture.chunking.mlp_ops import COLUMNS_MULTIPLE
from remat.graph_capture.chunking.regions import IsExact, RegionCandidate
from remat.graph_capture.chunking.replace import HeadOrMlp
from remat.graph_capture.costs.cache import CostCache
from remat.graph_capture.costs.op_times import cost_key
from remat.graph_capture.devices.meter import Meter
from remat.graph_capture.torch_private.core import precision_settings

_IGNORED_PART = 0.1  # of the made targets: rows that the loss ignores


def _made_inputs(part: HeadOrMlp, seed: int) -> dict[fx.Node, Tensor]:
    at: Tensor = part.ends[0].meta["val"]
    with torch.random.fork_rng([at.device] if at.is_cuda else []):  # the user's random stream stays
        torch.manual_seed(seed)
        return _of_head(part) if isinstance(part, Head) else _of_mlp(part)


def _of_mlp(mlp: Mlp) -> dict[fx.Node, Tensor]:
    layers = (mlp.gate, mlp.down, *([mlp.up] if mlp.up else []))
    weights = (node for one in layers for node in (one.weight, one.bias))
    made = {node: _normal(node) for node in (mlp.gradient, *weights) if node is not None}
    x = _normal(mlp.gate.x)
    made |= {one.x: x for one in layers if one is not mlp.down}
    # The gradients of the first weights read x too, by nodes of their own perhaps.
    products = [one.weight for one in (mlp.of_gate, mlp.of_up) if one.weight is not None]
    read = [node for product in products for node in product.all_input_nodes]
    return made | dict.fromkeys({*read}.difference(mlp.forward, mlp.backward), x)


def _of_head(head: Head) -> dict[fx.Node, Tensor]:
    target: Any = head.loss.args[1]
    at: Tensor = target.meta["val"]
    row_term = head.smoothing.row_term if head.smoothing else None
    read = (head.x, head.weight, head.bias, head.gradient, row_term)
    made = {node: _normal(node) for node in read if node is not None}
    chosen = torch.randint(head.weight.meta["val"].shape[0], at.shape, device=at.device)
    is_ignored = torch.rand(at.shape, device=at.device) < _IGNORED_PART
    made[target] = chosen.masked_fill_(is_ignored, cast("int", head.loss.args[4]))
    class_weight = head.loss.args[2]
    if isinstance(class_weight, fx.Node):
        # Several nodes of the head read the same constant by nodes of their own.
        every = {one for n in (*head.forward, *head.backward) for one in n.all_input_nodes}
        same = [one for one in every if identity_of(one) == identity_of(class_weight)]
        # No weight of a class is negative.
        made |= dict.fromkeys([class_weight, *same], _normal(class_weight).abs())
    return made


def _normal(node: fx.Node) -> Tensor:
    like: Tensor = node.meta["val"]
    # Strides have a part in which kernel runs.
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.normal_()


_SEEN_NUMBERS, _MOST_DRAWS = 1 << 22, 16  # in 16 bits: logits that are compared, and most draws

_Key = tuple[str, str, str, int, bool, int]
_known: dict[_Key, bool] = {}  # by graph in chunks, device, region, chunks, how and threads


def matches_eager_bitwise(found: RegionCandidate) -> bool | None:
    """None: memory ran out. It takes the memory of four times the logits, or what an MLP holds."""
    # Equal kernels on equal shapes: of parts that are alike, one is compared.
    alike = {_likeness(*pair): pair for pair in zip(found.parts, found.nodes, strict=True)}
    try:
        return all(_are_same_bits(*pair) for pair in alike.values())
    except RuntimeError as error:  # of CUDA's allocator too
        if "memory" not in str(error):
            raise
        if found.is_asked:
            warnings.warn(
                f"{found.name} stays whole: memory ran out before its bits in {found.chunks} "
                "chunks could be compared with eager's",
                stacklevel=2,
            )
        return None


def _likeness(part: HeadOrMlp, nodes: Sequence[fx.Node]) -> str:
    """What decides which kernels run, whole and in chunks: shapes, strides, dtypes and scalars."""
    return "\n".join(cost_key(node) for node in (*part.forward, *part.backward, *nodes))


def is_known_to_give_them(graph_hash: str, device: str, region: str, chunks: int) -> bool:
    """Whether this process has found that a region in exact chunks gives eager's bits."""
    # The hash is of the graph in chunks, so that a plan that was edited is compared too.
    return _known.get(_fact(graph_hash, device, region, chunks, True), False)


def _fact(graph_hash: str, device: str, region: str, chunks: int, is_exact: bool) -> _Key:
    # Threads share a sum, so bits may change with their number.
    return graph_hash, device, region, chunks, is_exact, torch.get_num_threads()


def _are_same_bits(part: HeadOrMlp, nodes: Sequence[fx.Node]) -> bool:
    # Made data might not show the few elements that differ.
    if isinstance(part, Mlp) and not _has_equal_blocks(part, cast("int", nodes[0].args[-1])):
        return False
    like: Tensor = (part.gate.product if isinstance(part, Mlp) else part.product).meta["val"]
    draws = 1
    if like.dtype.itemsize < torch.float32.itemsize:
        # Another order of sums seldom shows in 16 bits of few numbers.
        draws = min(max(_SEEN_NUMBERS // max(like.numel(), 1), 1), _MOST_DRAWS)
    return all(_are_same_once(part, nodes, seed) for seed in range(draws))


def _are_same_once(part: HeadOrMlp, nodes: Sequence[fx.Node], seed: int) -> bool:
    made = _made_inputs(part, seed)
    captured, results = [*part.forward, *part.backward], _Results(dict(made))
    order = {node: i for i, node in enumerate(captured[0].graph.nodes)}
    for node in sorted(captured, key=order.__getitem__):  # in graph order: no long chains
        results[node]
    expected = {node.name: results[node] for node in part.ends}
    del results  # or what is in between would be there beside the chunks
    found = _run_chunks(nodes, dict(made))
    return all(torch.equal(value, found[name]) for name, value in expected.items() if name in found)


def _has_equal_blocks(mlp: Mlp, chunks: int) -> bool:
    like: Tensor = mlp.gate.product.meta["val"]
    rows, columns = like.shape
    sizes = {(b - a) * columns for a, b in blocks(rows, chunks)}
    sizes |= {(b - a) * rows for a, b in blocks(columns, chunks, COLUMNS_MULTIPLE)}
    return has_equal_blocks(mlp.activation, like, [rows * columns, *sizes])


class _Results(dict[fx.Node, Any]):
    """By node, each computed when first asked for."""

    # No nested function that calls itself: it would hold these tensors until garbage is collected.

    def __missing__(self, node: fx.Node) -> Any:
        target: Any = node.target
        args = fx.map_arg(node.args, self.__getitem__)
        self[node] = target(*args, **fx.map_arg(node.kwargs, self.__getitem__))
        return self[node]


def _run_chunks(nodes: Sequence[fx.Node], known: dict[fx.Node, Tensor]) -> dict[str, Tensor]:
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


# Kept on disk beside costs, by device, settings and torch: to compare takes a few runs.


def kept_bits(meter: Meter, cache: CostCache | None = None) -> IsExact:
    """`matches_eager_bitwise`, asked once for each region and number of chunks."""
    kept = cache or CostCache.of(meter)

    def has_them(found: RegionCandidate) -> bool:
        key = _digest_of(found)
        if key not in kept.bits:
            answer = matches_eager_bitwise(found)
            if answer is None:  # not kept: another time there may be room
                return False
            kept.bits[key] = answer
            kept.save()
        device = str(found.parts[0].ends[0].meta["val"].device)
        facts = found.joint.graph.hash, device, found.name, found.chunks, found.is_exact
        _known[_fact(*facts)] = kept.bits[key]
        return kept.bits[key]

    return has_them


def _digest_of(found: RegionCandidate) -> str:
    parts = [
        f"{_SEEN_NUMBERS} logits in {_MOST_DRAWS} draws",
        torch.backends.cpu.get_cpu_capability(),
        *precision_settings(),
        str(torch.are_deterministic_algorithms_enabled()),
        str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        os.environ.get("MKL_CBWR", ""),  # chooses the branch of MKL's code
    ]
    pairs = zip(found.parts, found.nodes, strict=True)
    parts += dict.fromkeys(_likeness(*pair) for pair in pairs)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
