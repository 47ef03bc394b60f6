"""From a factory to a chain without storage: the facts and parts that a cluster is planned from."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from remat import __version__
from remat.cluster.capture.model_chain import (
    ChainModel,
    ChainShape,
    chain_of,
    loose_state,
    refuse_stages,
    why_unstaged,
)
from remat.cluster.capture.rank_graph import (
    before_graph_on_rank,
    behind_graph_on_rank,
    block_graph_on_rank,
    runs_split,
)
from remat.cluster.capture.watching import watch
from remat.cluster.mesh import Cluster, ClusterRequest, Job, MeshSpec, Weights
from remat.cluster.parts import (
    ChainPosition,
    Part,
    PartOption,
    PartWork,
    block_position,
    forward_part,
    part_of,
    weights_later,
)
from remat.graph_capture.devices.known_devices import device_table
from remat.graph_capture.distributed.collectives import FakeGroups
from remat.graph_capture.errors import CaptureError, FactoryError
from remat.graph_capture.files import CacheFiles, decode_json
from remat.graph_capture.graph import TrainingGraph
from remat.job.factory import call
from remat.job.named_function import NamedFunction, function_named

_SEQ_NAMES = ("seq", "sequence", "seq_len")
_TENSOR, _CONTEXT = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)
"""Tensor and context parallel degrees that are tried."""
_BACKWARD_TIMES = 3
"""Operations of forward and backward over those of forward: two products for each one, and one
where the weight is frozen."""

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
            # Without storage: a cluster's model need not fit here.
            with function_named(self.source) as named, torch.device("meta"):
                sizes = {"batch": microbatch, _seq_name(named): seq}
                title = f"factory {named.name} of {named.where}"
                loaded = call(named.function, str(named), sizes, title)
            given = loaded.args, loaded.kwargs, loaded.loss_fn, loaded.target, self.pattern
            chain = chain_of(loaded.model, *given)
            try:
                self.known[key] = chain, watch(chain)
            except CaptureError:
                # The largest list may be a chain where all of them are none.
                largest = chain_of(chain.model, *given, is_whole=False)
                if len(largest.blocks) == len(chain.blocks):
                    raise
                self.known[key] = largest, watch(largest)
        return self.known[key]


def _seq_name(named: NamedFunction) -> str:
    taken = inspect.signature(named.function).parameters
    found = next((name for name in _SEQ_NAMES if name in taken), None)
    if found is None or "batch" not in taken:
        raise FactoryError(
            "write it as def factory(batch=1, seq=8192): ..., and build a batch of that size: "
            f"factory {named.name} of {named.where} takes {', '.join(taken) or 'nothing'}"
        )
    return found


def job_of(chains: Chains, request: ClusterRequest, groups: FakeGroups) -> Job:
    """`CaptureError` where a degree that is asked for cannot be, or stages would share weights."""
    (chain, shape), asked = chains.at(1, request.seq), request.asked
    assert shape.border is not None
    if not any(p.requires_grad for p in chain.model.parameters()):
        raise CaptureError(
            f"let some parameter train: none of {type(chain.model).__name__} requires a gradient"
        )
    if asked.pp not in (None, 1):
        refuse_stages(chain, shape)
    flops, counted = shape.products_flops, shape.attention_flops
    kinds = shape.kinds if len(shape.blocks) > 1 else ()
    job = Job(
        type(chain.model).__name__, len(chain.blocks), request.batch, request.seq, {},
        max(block.read.numel() * block.read.element_size() for _, block in shape.blocks),
        {place: _passes(chain, shape, place) * of_place for place, of_place in flops.items()}, 0,
        _tensor_degrees(chain, shape, asked, groups, request.node_size),
        _context_degrees(shape, asked), why_unstaged(chain, shape), tuple(sorted(shape.heads)),
        kinds, shape.unrun or loose_state(chain), shape.unsent,
    )  # fmt: skip
    weights = {place: _weights(chain, shape, place) for place in flops}
    of_attention = {place: (1 if _is_idle(shape, place) else _BACKWARD_TIMES) for place in flops}
    model_flops = sum(
        job.products_flops[place] + of_attention[place] * counted[place]
        for place in job.all_positions
    )
    return replace(job, weights=weights, model_flops=model_flops)


def _is_idle(shape: ChainShape, place: ChainPosition) -> bool:
    """Whether backward does not reach a kind of block."""
    places = [block_position(kind) for kind in range(len(shape.blocks))]
    return place in places and not shape.blocks[places.index(place)][1].trains


def _passes(chain: ChainModel, shape: ChainShape, place: ChainPosition) -> int:
    """How many products a step has for each one of forward, at least."""
    if _is_idle(shape, place):
        return 1
    trained = (chain.model.get_parameter(n).requires_grad for n in shape.parameters[place])
    return _BACKWARD_TIMES if all(trained) else _BACKWARD_TIMES - 1


def _weights(chain: ChainModel, shape: ChainShape, place: ChainPosition) -> Weights:
    modules = dict(chain.model.named_modules())
    found = Counter[tuple[bool, bool]]()
    # Without stages, weights that are tied are there once.
    before = shape.parameters["first"] if place == "last" else set[str]()
    for name in sorted(shape.parameters[place] - before):
        path, _, kind = name.rpartition(".")
        role = shape.roles.get(path)
        # The rows of an embedding are the vocabulary, which tensor parallel ranks share.
        is_split = role == "columns" or (role == "rows" and kind == "weight")
        is_split |= isinstance(modules.get(path), nn.Embedding)
        parameter = chain.model.get_parameter(name)
        found[is_split, parameter.requires_grad] += parameter.numel()
    frozen = found[True, False], found[False, False]
    return Weights(found[True, True] + frozen[0], found[False, True] + frozen[1], *frozen)


def _tensor_degrees(
    chain: ChainModel, shape: ChainShape, asked: MeshSpec, groups: FakeGroups, most: int
) -> tuple[int, ...]:
    tried = (asked.tp,) if asked.tp is not None else tuple(tp for tp in _TENSOR if tp <= most)
    # The block is run with a part of its heads: only that shows whether its views allow it.
    whys = {tp: runs_split(chain, shape, tp, groups) if tp > 1 else "" for tp in tried}
    if asked.tp is not None and whys[asked.tp]:
        raise CaptureError(
            f"choose another --tp, or --tp 1: block {chain.first_path} cannot be split over tp "
            f"{asked.tp}: {whys[asked.tp]}. Its heads and layers must divide by it, and views "
            "must name them by -1"
        )
    return tuple(tp for tp in tried if not whys[tp])


def _context_degrees(shape: ChainShape, asked: MeshSpec) -> tuple[int, ...]:
    why = shape.unshared
    if not shape.has_fused_attention or shape.has_open_attention:
        why = "is not torch.nn.functional.scaled_dot_product_attention"
    if asked.cp not in (None, 1) and why:
        raise CaptureError(
            f"choose --cp 1: cp {asked.cp} shares the heads of attention over ranks, and this "
            f"attention {why}"
        )
    if why:
        return (1,)
    return _CONTEXT if asked.cp is None else (asked.cp,)


# Parts of a job, captured and solved when first asked for, and kept on disk for the next plan.
#
# A file is named by all that its part depends on: the ops of one forward with their shapes and
# numbers, the split, the device and its prices, the links, and the versions of torch and remat.


_SCHEMA = 7  # of the files; those of another one are not read
_FILES = CacheFiles("parts of clusters", "each plan captures them anew", "cluster", most_files=4096)


class _KeptPart(msgspec.Struct, frozen=True):
    """A graph, None for what is not captured, and its part, None while no options were asked for.

    `border_gradient` : of a block, the value that is the gradient of what it reads.
    """

    graph: TrainingGraph | None
    part: Part | None = None
    border_gradient: str = ""


_PartKey = tuple[ChainPosition, int, int, int]
"""Of a part: its place, tensor and context parallel ranks, and sequences of a microbatch."""


@dataclass
class KeptParts:
    """The parts of one job on one cluster; some are `captured` now, and others `read` from disk."""

    chains: Chains
    job: Job
    cluster: Cluster
    groups: FakeGroups
    captured: int = 0
    read: int = 0
    known: dict[_PartKey, _KeptPart] = field(default_factory=dict[_PartKey, _KeptPart])

    def work(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> PartWork:
        found = self._begun((place, tp, cp, microbatch))
        if found.part is not None:
            return found.part.work
        assert found.graph is not None
        if not self._trains(place):
            return PartWork(forward_part(found.graph).work_us)
        # A mesh that its work alone rules out needs no options.
        later = weights_later(found.graph, found.border_gradient)
        return PartWork(found.graph.time_us, later.weight_us)

    def part(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> Part:
        key = place, tp, cp, microbatch
        found = self._begun(key)
        if found.part is not None:
            return found.part
        assert found.graph is not None
        if place == "first":
            part = self._with_given(part_of(found.graph), key)
        elif self._trains(place):
            part = part_of(found.graph, found.border_gradient)
        else:
            part = forward_part(found.graph)
        self.known[key] = msgspec.structs.replace(found, part=part)
        # Written once more, now with its options.
        self._keep(key)
        return part

    def _trains(self, place: ChainPosition) -> bool:
        """Whether backward reaches a part of the chain."""
        return not _is_idle(self.chains.at(1, self.job.seq)[1], place)

    def graph(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> TrainingGraph:
        found = self._begun((place, tp, cp, microbatch)).graph
        assert found is not None
        return found

    def _begun(self, key: _PartKey) -> _KeptPart:
        if key in self.known:
            return self.known[key]
        place, tp, cp, microbatch = key
        if place == "first" and not self._computes_before():
            found = _KeptPart(None, self._with_given(self._embedding(tp, cp, microbatch), key))
        else:
            found = _FILES.read(self._name(*key), lambda data: decode_json(data, _KeptPart))
            self.read += found is not None
        if found is None:
            self.captured += 1
            found = self.known[key] = self._captured(*key)
            self._keep(key)
        self.known[key] = found
        return found

    def _computes_before(self) -> bool:
        """Whether more than rows of a table come before the blocks."""
        _, shape = self.chains.at(1, self.job.seq)
        return bool(shape.products_flops["first"] + shape.attention_flops["first"])

    def _with_given(self, part: Part, key: _PartKey) -> Part:
        """What all blocks are given, such as a mask, is there until backward."""
        _, _, cp, microbatch = key
        given = microbatch * self.chains.at(1, self.job.seq)[1].given_bytes // cp
        # It is run as it is, so it keeps all.
        option = replace(part.options[0], recomputed=())
        return replace(part, options=(replace(option, saved_bytes=option.saved_bytes + given),))

    def _embedding(self, tp: int, cp: int, microbatch: int) -> Part:
        """Costed by its bytes: rows read and written, a gradient filled and added."""
        rows = microbatch * self.job.border_bytes / (tp * cp)
        table_bytes = 2 * self.job.weights["first"].on_rank(tp)
        rate = self.cluster.bytes_per_us
        forward_us, backward_us = 2 * rows / rate, (table_bytes + 2 * rows) / rate
        need = int(rows) + table_bytes
        return Part(forward_us, backward_us, (PartOption(0, need, 0.0),))

    def _keep(self, key: _PartKey) -> None:
        _FILES.write(self._name(*key), msgspec.json.encode(self.known[key]))

    def _captured(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> _KeptPart:
        chain, shape = self.chains.at(microbatch, self.job.seq // cp)
        self._require_batch(shape, cp, microbatch)
        device, links = self.cluster.device, self.cluster.links
        if place in self.job.block_positions:
            kind = self.job.block_positions.index(place)
            graph, gradient = block_graph_on_rank(
                chain, shape, kind, tp, cp, self.groups, device, links
            )
            return _KeptPart(graph, border_gradient=gradient)
        if place == "first":
            return _KeptPart(before_graph_on_rank(chain, self.groups, device, links))
        return _KeptPart(behind_graph_on_rank(chain, shape, tp, self.groups, device, links))

    def _require_batch(self, shape: ChainShape, cp: int, microbatch: int) -> None:
        """A step is priced by what its factory makes of `batch`."""
        of_one = self.chains.at(1, self.job.seq // cp)[1].blocks[0][1].read.numel()
        found = shape.blocks[0][1].read.numel()
        if found != microbatch * of_one:
            raise FactoryError(
                f"build as many sequences as batch says in {self.chains.source}: its blocks read "
                f"{of_one:,} numbers at batch=1 and {found:,} at batch={microbatch}"
            )

    def _name(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> str:
        # The ops at microbatch 1 stand for all; the microbatch is named beside them.
        _, shape = self.chains.at(1, self.job.seq)
        said = (
            _SCHEMA, shape.digest, place, tp, cp, microbatch, self.job.seq, self.cluster.device,
            device_table(), self.cluster.links, str(torch.__version__), __version__,
        )  # fmt: skip
        return f"{hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:24]}.json"
