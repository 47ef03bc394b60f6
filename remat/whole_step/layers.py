"""From the captured graph of one batch to its layers: what each takes, and how it may run.

Layers are the repeated blocks that `solver/blocks` finds by structure, and what is before and
after them. Each distinct one is solved once, as in `hierarchical`, at several limits on what it
saves. What other layers read stays a value of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, takewhile

from msgspec.structs import replace

from remat.graph_capture.distributed.sharding import element_bytes
from remat.graph_capture.errors import SolverError, option
from remat.graph_capture.graph import TrainingGraph, Value, cached_on
from remat.solver.blocks.block_options import BlockOption, Options, block_graph, block_options
from remat.solver.blocks.repeated import Block, Reads, Shape, find_blocks, shape_of
from remat.solver.problem import Problem
from remat.whole_step.microbatch import Layer, LayerOption, Microbatch, UpdateGroup


def _layer_option(
    option: BlockOption, block: Block, held_bytes: int, back_bytes: int, *, turns: bool
) -> LayerOption:
    """A block's option, with what each phase takes beside what the whole step's graph counts."""
    turn = block.stop - block.start
    # A block's own graph holds values that others read until the block is done. In the whole step
    # they are separate values, which may go earlier.
    saved_bytes = 0 if turns else option.saved_bytes - held_bytes
    beside = 0 if turns else saved_bytes + held_bytes
    forward, backward = option.live_bytes[: turn + 1], option.live_bytes[turn:]
    # Both phases of the last layer are one op, so it saves nothing.
    if turns:
        forward, backward = option.live_bytes[:0], option.live_bytes
        back_bytes += held_bytes
    return LayerOption(
        saved_bytes=saved_bytes, extra_us=option.extra_us,
        forward_workspace_bytes=max(int(forward.max(initial=0)) - beside, 0),
        backward_workspace_bytes=max(int(backward.max()) - beside - back_bytes, 0),
        recomputed=option.recomputed,
    )  # fmt: skip


def _worth_having(options: Sequence[LayerOption]) -> list[LayerOption]:
    kept: list[LayerOption] = []
    for one in sorted(options, key=lambda option: (option.extra_us, option.saved_bytes)):
        is_worse = any(
            other.saved_bytes <= one.saved_bytes
            and other.forward_workspace_bytes <= one.forward_workspace_bytes
            and other.backward_workspace_bytes <= one.backward_workspace_bytes
            for other in kept
        )
        if not is_worse:
            kept.append(one)
    return kept


def _parameter_gradients(graph: TrainingGraph, parameters: Collection[str]) -> dict[str, str]:
    """The gradient of each parameter that has one; `parameters` are those that an op reads."""
    values, found = graph.value_by_name, dict[str, str]()
    waiting = [v for v in graph.values if v.name in parameters]
    for name in graph.outputs:
        gradient = values[name]
        if gradient.kind != "gradient" or not gradient.producer:
            continue
        # Gradients come in the order of the parameters; frozen ones have none and are skipped.
        facts = gradient.dtype, _elements(gradient)
        fitting = (i for i, v in enumerate(waiting) if (v.dtype, _elements(v)) == facts)
        at = next(fitting, None)
        if at is None:
            raise SolverError(
                f"give inputs that do not require grad: gradient {name} of {graph.name} is not a "
                "parameter's, and a whole step only keeps those"
            )
        found[waiting[at].name] = name
        del waiting[: at + 1]
    return found


def _elements(value: Value) -> int:
    return math.prod(value.shape)


_LIMITS = 12  # at how many limits on what it saves a layer is solved
_UNLIMITED_S = 1e9
"""The programs of a block are limited by their nodes alone, so that options do not depend on how
busy the machine is."""


def microbatch_of(graph: TrainingGraph, gradient_of: Mapping[str, str] | None = None) -> Microbatch:
    """The layers of a captured graph of one batch, each with its options.

    `gradient_of` has the gradient of each trained parameter. Left out, they are told by order
    and shapes, which frozen parameters of the same shapes confuse.
    """
    if gradient_of is not None:
        return _Layers(graph, gradient_of).microbatch()
    return cached_on(graph, "layers of a microbatch", lambda: _Layers(graph).microbatch())


class _Layers:
    """A graph cut into layers.

    `ranges` : of each layer, its ops. `layer_of` : of each op, its layer. `group_of` : of each
    parameter, the group of those that the same layers read and whose gradients the same layer makes
    whole. `readers` : of each group, the layers that read it. `given_by` : the layer in whose
    backward the gradient of a parameter is whole, and after which nothing reads the parameter.
    """

    def __init__(self, graph: TrainingGraph, known: Mapping[str, str] | None = None) -> None:
        self.graph, self.problem = graph, Problem.of(graph)
        self.reads = Reads.of(self.problem)
        self.ranges = find_blocks(self.problem, self.reads)
        if len(self.ranges) < 3:
            raise SolverError(
                f"leave out {option('microbatches')}, or give the model more equal layers: a whole "
                f"step is planned layer by layer, and the {self.problem.n_forward} forward ops of "
                f"{graph.name} repeat too seldom to be cut into 3 layers or more"
            )
        names = [op.name for op in graph.ops]
        layer_of = {names[op]: at for at, one in enumerate(self.ranges) for op in one.ops}
        read_by: dict[str, dict[int, None]] = {}
        for op in graph.ops:
            for name in op.inputs:
                if graph.value_by_name[name].kind == "parameter":
                    read_by.setdefault(name, {})[layer_of[op.name]] = None
        known = _parameter_gradients(graph, read_by) if known is None else known
        self.gradient_of = {name: known[name] for name in read_by if name in known}
        last = {v: layer_of[op.name] for op in graph.ops for v in (*op.inputs, *op.outputs)}
        # With tied parameters, a later layer adds in place to an earlier one's gradient. Backward
        # ends with the first layer, so the least number is the latest.
        read = ((name, gradient) for name, gradient in known.items() if name in read_by)
        given_by = {name: min(last[gradient], *read_by[name]) for name, gradient in read}
        keys = {n: (tuple(sorted(found)), given_by.get(n, -1)) for n, found in read_by.items()}
        groups = list(dict.fromkeys(keys.values()))
        self.group_of = {name: groups.index(key) for name, key in keys.items()}
        self.readers = [readers for readers, _ in groups]
        self.layer_of, self.given_by = layer_of, given_by

    def microbatch(self) -> Microbatch:
        graph = self.graph
        crossing, tables = self._crossing(), self._tables()
        cut = enumerate(zip(self.ranges, tables, strict=True))
        layers = tuple(self._layer(at, one, table, crossing) for at, (one, table) in cut)
        outputs = tuple(name for name in graph.forward_outputs if name in crossing)
        # Parameters that no op reads never move.
        parameters = (v for v in graph.values if v.kind == "parameter")
        unread_bytes = sum(v.size_bytes for v in parameters if v.name not in self.group_of)
        # Parameters, gradients and states are values of the step's graph; all else is resident.
        resident = replace(
            graph.resident, parameters_bytes=unread_bytes, gradients_bytes=0, optimizer_bytes=0
        )
        forward = {op.name for op in graph.ops if op.phase == "forward"}
        return Microbatch(
            graph.name, layers, self._groups(), crossing, outputs, resident, graph.device,
            graph.inputs, graph.cost_origin, draws=not forward.isdisjoint(graph.ordered_ops),
        )  # fmt: skip

    def _crossing(self) -> dict[str, int]:
        values, found = self.graph.value_by_name, dict[str, int]()
        for op in self.graph.ops:
            for name in op.inputs:
                producer = values[name].producer
                if producer and self.layer_of[producer] != self.layer_of[op.name]:
                    found[name] = values[name].size_bytes
        for name in self.graph.forward_outputs:
            if values[name].producer:
                found[name] = values[name].size_bytes
        return found

    def _groups(self) -> tuple[UpdateGroup, ...]:
        values, groups, gives = self.graph.value_by_name, list[UpdateGroup](), self.gradient_of
        for at, readers in enumerate(self.readers):
            mine = [values[name] for name, group in self.group_of.items() if group == at]
            trained = [one for one in mine if one.name in gives]
            groups.append(UpdateGroup(
                name=" and ".join(self._name(layer) for layer in readers),
                trained=sum(_elements(one) for one in trained),
                parameter_bytes=sum(one.size_bytes for one in mine),
                gradient_bytes=sum(values[gives[one.name]].size_bytes for one in trained),
                item_bytes=max((element_bytes(one.dtype) for one in trained), default=0),
                gradient_of={one.name: gives.get(one.name, "") for one in mine},
            ))  # fmt: skip
        return tuple(groups)

    def _name(self, at: int) -> str:
        """The module that all ops of a layer are in, or those at the top that they are in."""
        ops = (self.graph.ops[op] for op in self.ranges[at].ops)
        paths = dict.fromkeys(op.module for op in ops if op.module)
        parts = [path.split(".") for path in paths]
        same = takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
        if shared := [names[0] for names in same]:
            return ".".join(shared)
        return ", ".join(dict.fromkeys(path[0] for path in parts)) or f"layer {at}"

    def _tables(self) -> list[Options]:
        known: dict[Shape, Options] = {}
        tables: list[Options] = []
        for one in self.ranges:
            shape = shape_of(self.problem, self.reads, one)
            if shape not in known:  # equal layers share their options
                small = block_graph(self.problem, self.reads, one)
                known[shape] = block_options(small, _LIMITS, lambda: _UNLIMITED_S)
            tables.append(known[shape])
        return tables

    def _layer(self, at: int, block: Block, options: Options, crossing: dict[str, int]) -> Layer:
        ops = [self.graph.ops[op] for op in block.ops]
        halves = [[op for op in ops if op.phase == phase] for phase in ("forward", "backward")]
        reads, makes = list[list[str]](), list[list[str]]()
        for half in halves:
            inputs = dict.fromkeys(v for op in half for v in op.inputs if v in crossing)
            made = [v for op in half for v in op.outputs if v in crossing]
            own = set(made) if half is halves[0] else set[str]()
            reads.append([name for name in inputs if name not in own])
            makes.append(made)
        turns = at == len(self.ranges) - 1
        groups = dict.fromkeys(self.group_of[v] for op in ops for v in op.inputs
                               if v in self.group_of)  # fmt: skip
        given = dict.fromkeys(self.group_of[p] for p, layer in self.given_by.items() if layer == at)
        # A block on its own may drop a gradient or a loss and make it again at its end. In a whole
        # step they are added or returned at once.
        lasting = self._makers_of_outputs(block)
        kept = [one for one in options if lasting.isdisjoint(chain(*one.recomputed))]
        held_bytes = sum(crossing[name] for name in makes[0])
        back_bytes = sum(crossing[name] for name in makes[1])
        sizes = held_bytes, back_bytes
        found = [_layer_option(option, block, *sizes, turns=turns) for option in kept]
        read_back = (name for name in reads[1] if name not in makes[1])
        return Layer(
            self._name(at), tuple(groups), tuple(given),
            sum(op.cost_us for op in halves[0]), sum(op.cost_us for op in halves[1]),
            tuple(reads[0]), tuple(makes[0]), tuple(read_back), tuple(makes[1]),
            tuple(_worth_having(found)), turns,
            *(tuple(op.name for op in half) for half in halves),
        )  # fmt: skip

    def _makers_of_outputs(self, block: Block) -> set[int]:
        """Ops of a block, counted with its turn, that make a gradient or a loss."""
        ends, turn = set(self.graph.outputs), block.stop - block.start
        return {
            place + (place >= turn)
            for place, op in enumerate(block.ops)
            if not ends.isdisjoint(self.graph.ops[op].outputs)
        }
