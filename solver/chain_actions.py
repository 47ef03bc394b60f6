"""Schedules of a chain as actions on its stages, and the ops that these run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from remat.solver.chains.chain import Chain, ChainStage

Kind = Literal["store", "forward", "save", "backward", "discard"]


class Action(NamedTuple):
    """One step of a chain schedule.

    ``forward`` runs a stage and keeps its result alone, ``save`` keeps what backward reads
    too, ``backward`` runs the stage's backward ops. ``store`` puts the value that enters the
    stage into a slot, ``discard`` empties the slot.
    """

    kind: Kind
    stage: int


def runs_of(chain: Chain, actions: Sequence[Action]) -> list[tuple[int, ...]]:
    """For each of `actions` the ops that it runs.

    First runs are whole stages; later ones are those ops that make what is asked for.
    """
    following = (*actions[1:], None)
    reached, runs = 0, list[tuple[int, ...]]()
    for (kind, i), after in zip(actions, following, strict=True):
        if kind in ("store", "discard"):
            runs.append(())
        elif kind == "backward":
            runs.append(chain.stages[i].backward)
        elif i == reached:
            runs.append(chain.stages[i].first_save.ops)
            reached += 1
        else:
            runs.append(_run_again(chain.stages[i], kind, after == Action("backward", i)))
    return runs


def _run_again(stage: ChainStage, kind: Kind, is_leaf: bool) -> tuple[int, ...]:
    if kind == "forward":
        return stage.again_drop.ops
    return (stage.again_leaf if is_leaf else stage.again_save).ops
