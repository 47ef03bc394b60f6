"""From a factory to a chain without storage, and the facts that a cluster is planned from."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn

from remat.cluster.capture.chain_shape import (
    CHAIN_POSITIONS,
    ChainPosition,
    ChainShape,
    shares_heads,
)
from remat.cluster.capture.model_chain import ChainModel, chain_of
from remat.cluster.capture.rank_graph import runs_split
from remat.cluster.capture.watching import watch
from remat.cluster.mesh import Job, MeshSpec, Weights
from remat.graph_capture.distributed.fake_group import FakeGroups
from remat.graph_capture.errors import CaptureError, FactoryError
from remat.job.factory import Loaded, NamedFunction, call, function_named

_SEQ_NAMES = ("seq", "sequence", "seq_len")
_TENSOR, _CONTEXT = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)
"""Tensor and context parallel degrees that are tried."""
_BACKWARD_TIMES = 3
"""Operations of forward and backward over those of forward: two products for each one."""

_Shown = tuple[ChainModel, ChainShape]


@dataclass
class Chains:
    """Chains of one factory by microbatch and tokens, each made when first asked for."""

    source: str
    pattern: str
    known: dict[tuple[int, int], _Shown] = field(default_factory=dict[tuple[int, int], _Shown])

    def at(self, microbatch: int, seq: int) -> _Shown:
        """With what its forward shows; `CaptureError` where the model is no chain."""
        key = microbatch, seq
        if key not in self.known:
            loaded = _loaded(self.source, microbatch, seq)
            chain = chain_of(
                loaded.model, loaded.args, loaded.kwargs, loaded.loss_fn, loaded.target,
                self.pattern,
            )  # fmt: skip
            self.known[key] = chain, watch(chain)
        return self.known[key]


def _loaded(source: str, batch: int, seq: int) -> Loaded:
    # Without storage: a cluster's model need not fit here.
    with function_named(source) as named, torch.device("meta"):
        sizes = {"batch": batch, _seq_name(named): seq}
        return call(named.function, str(named), sizes, f"factory {named.name} of {named.where}")


def _seq_name(named: NamedFunction) -> str:
    taken = inspect.signature(named.function).parameters
    found = next((name for name in _SEQ_NAMES if name in taken), None)
    if found is None or "batch" not in taken:
        raise FactoryError(
            f"factory {named.name} of {named.where} takes {', '.join(taken) or 'nothing'}: for a "
            "cluster write it as def factory(batch=1, seq=8192): ..., and build a batch of that "
            "size"
        )
    return found


def job_of(
    chains: Chains, batch: int, seq: int, asked: MeshSpec, groups: FakeGroups, most_tp: int
) -> Job:
    """`CaptureError` where a degree that is asked for cannot be, or stages would share weights."""
    chain, shape = chains.at(1, seq)
    assert shape.border is not None
    if shape.products_flops["first"]:
        raise CaptureError(
            f"there are matrix products before block {chain.first_path}, and a chain begins with "
            "an embedding: name the blocks with --blocks, so that they begin there"
        )
    tied = tied_weights(chain, shape)
    if tied and asked.pp not in (None, 1):
        raise CaptureError(
            f"{' and '.join(tied)} are in two stages, which cannot share weights: untie them, or "
            "plan without stages with --pp 1"
        )
    flops = shape.products_flops
    layers = len(chain.blocks)
    blocks_flops = layers * (flops["block"] + shape.attention_flops)
    return Job(
        type(chain.model).__name__, layers, batch, seq,
        {place: _weights(chain, shape, place) for place in CHAIN_POSITIONS},
        shape.border.numel() * shape.border.element_size(),
        {place: _BACKWARD_TIMES * flops[place] for place in CHAIN_POSITIONS},
        _BACKWARD_TIMES * (blocks_flops + flops["last"]),
        _tensor_degrees(chain, shape, asked, groups, most_tp), _context_degrees(shape, asked),
        tied, tuple(sorted(shape.heads)),
    )  # fmt: skip


def tied_weights(chain: ChainModel, shape: ChainShape) -> tuple[str, ...]:
    """Parameters that two stages would share."""
    both = shape.parameters["first"] & shape.parameters["last"]
    # A weight that one block uses twice is in one stage all the same.
    count = Counter(id(p) for block in chain.blocks.values() for p in set(block.parameters()))
    names = chain.model.named_parameters()
    return tuple(name for name, p in names if name in both or count[id(p)] > 1)


def _weights(chain: ChainModel, shape: ChainShape, place: ChainPosition) -> Weights:
    modules = dict(chain.model.named_modules())
    split = whole = 0
    for name in sorted(shape.parameters[place]):
        path, _, kind = name.rpartition(".")
        role = shape.roles.get(path)
        # The rows of an embedding are the vocabulary, which tensor parallel ranks share.
        is_split = role == "columns" or (role == "rows" and kind == "weight")
        is_split |= isinstance(modules.get(path), nn.Embedding)
        elements = chain.model.get_parameter(name).numel()
        split, whole = split + elements * is_split, whole + elements * (not is_split)
    return Weights(split, whole)


def _tensor_degrees(
    chain: ChainModel, shape: ChainShape, asked: MeshSpec, groups: FakeGroups, most: int
) -> tuple[int, ...]:
    tried = (asked.tp,) if asked.tp is not None else tuple(tp for tp in _TENSOR if tp <= most)
    # The block is run with a part of its heads: only that shows whether its views allow it.
    whys = {tp: runs_split(chain, shape, tp, groups) if tp > 1 else "" for tp in tried}
    if asked.tp is not None and whys[asked.tp]:
        raise CaptureError(
            f"block {chain.first_path} cannot be split over tp {asked.tp}: {whys[asked.tp]}. Its "
            "heads and its layers must divide by it, and views name them by -1; choose another "
            "--tp, or --tp 1"
        )
    return tuple(tp for tp in tried if not whys[tp])


def _context_degrees(shape: ChainShape, asked: MeshSpec) -> tuple[int, ...]:
    why = shape.unshared
    if not shape.has_fused_attention or shape.has_open_attention:
        why = "is not torch.nn.functional.scaled_dot_product_attention"
    for queries, keys in shape.heads:
        if asked.cp is not None and not shares_heads((queries, keys), 1, asked.cp):
            why = why or f"has {queries} heads of queries and {keys} of keys"
    if asked.cp not in (None, 1) and why:
        raise CaptureError(
            f"cp {asked.cp} shares the heads of attention over ranks, and this attention {why}: "
            "choose --cp 1"
        )
    if why:
        return (1,)
    return _CONTEXT if asked.cp is None else (asked.cp,)
