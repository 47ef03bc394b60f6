"""Gradients that are handed over as they are made, to be added to those of earlier batches.

Eager's autograd adds each gradient to ``.grad`` as soon as backward has made it, and lets go of it
(`AccumulateGrad`). A step that returned all of them together would hold them to its end, beside
those that they are added to. So a step that accumulates has an op for it, `DELIVER`: after it,
nothing needs the gradient any more. Without accumulation there is nothing to gain: ``.grad`` is
then the gradient itself, and stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta

from remat.graph_capture.graph import DELIVER, Op, Value
from remat.graph_capture.joint.values import Values

PARTS = 256
"""Gradients wait for others until they are this part of all: each delivery costs a call."""

_ALIASES_OF_INPUTS = (OutputType.alias_of_input, OutputType.is_input)


def can_hand_over(metadata: ViewAndMutationMeta) -> bool:
    """Whether a step's gradients can be handed over one by one.

    The step is then given views of what it differentiates. That cannot be where it writes to one of
    them, or returns a part of one.
    """
    inputs = metadata.input_info
    written = any(
        one.requires_grad and (one.mutates_data or one.mutates_metadata) for one in inputs
    )
    returned = any(
        one.output_type in _ALIASES_OF_INPUTS
        and one.base_idx is not None
        and inputs[one.base_idx].requires_grad
        for one in metadata.output_info
    )
    return not written and not returned


def of_parameters(gm: fx.GraphModule, num_forward_outputs: int) -> tuple[int, ...]:
    """The places, among the gradients of a joint graph, of those of parameters."""
    described = gm.graph.output_node().meta["desc"][num_forward_outputs:]
    return tuple(
        place
        for place, what in enumerate(described)
        if type(getattr(what, "grad_of", None)).__name__ == "ParamAOTInput"
    )


@dataclass
class Deliveries:
    """Adds the ops that hand over gradients.

    Attributes
    ----------
    gradients : the results of backward. places : of those among them that may be handed over.
    of_op : for each op that hands over, the places of its gradients.
    """

    gradients: Sequence[Any]
    places: Sequence[int]
    of_op: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    def returned(self) -> list[Any]:
        """The gradients that are not handed over but returned at the end."""
        handed = {place for places in self.of_op.values() for place in places}
        return [g for place, g in enumerate(self.gradients) if place not in handed]

    def added_to(self, ops: Sequence[Op], values: Values) -> list[Op]:
        """`ops` of backward, and behind them the ops that hand over what they make."""
        made = self._made_by_ops(values)
        least_bytes = sum(_sizes(values, (v for v, _ in made.values()))) / PARTS
        of_maker: dict[str, list[int]] = {}
        for place, (value, _) in made.items():
            of_maker.setdefault(values.by_name[value].producer, []).append(place)
        names = {op.name for op in ops}
        # What forward has made goes as backward begins.
        first = [p for maker, ps in of_maker.items() if maker not in names for p in ps]
        found: list[Op] = []
        waiting: list[int] = []
        for op in ops:
            found.append(op)
            new = [*(first if op is ops[0] else ()), *of_maker.get(op.name, ())]
            waiting += new
            held = dict.fromkeys(made[place][0] for place in waiting)
            if new and sum(_sizes(values, held)) >= least_bytes:
                found.append(self._op(op, tuple(held), waiting))
                waiting = []
        if waiting:
            held = dict.fromkeys(made[place][0] for place in waiting)
            found.append(self._op(ops[-1], tuple(held), waiting))
        return found

    def _made_by_ops(self, values: Values) -> dict[int, tuple[str, fx.Node]]:
        """By place: the value of each gradient that an op makes, and its node."""
        found: dict[int, tuple[str, fx.Node]] = {}
        for place in self.places:
            node = self.gradients[place]
            value = values.by_name.get(values.of(node)) if isinstance(node, fx.Node) else None
            if value is not None and value.producer and value.kind != "tangent":
                found[place] = value.name, node
        return found

    def _op(self, behind: Op, held: tuple[str, ...], places: Sequence[int]) -> Op:
        name = f"deliver_{held[-1]}"
        self.of_op[name] = tuple(places)
        return Op(
            name, DELIVER, "backward", held, (), pinned="it adds to what .grad holds",
            module=behind.module, source=behind.source,
        )  # fmt: skip


def _sizes(values: Values, names: Iterable[str]) -> Iterable[int]:
    found: Iterable[Value] = (values.by_name[name] for name in names)
    return (value.size_bytes for value in found)
