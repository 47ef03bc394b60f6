"""Orders in which boxes are placed greedily: eight by plain keys, twelve that begin at the peak."""

from __future__ import annotations

import numpy as np

from remat.solver.layout.boxes import Boxes, Floats, Ints


def box_orders(boxes: Boxes) -> dict[str, Ints]:
    """Orders by name, those that do well first; where keys are alike the next one decides.

    At last the index does. By start, and by end from the last on, boxes of one size leave no hole
    in an empty arena: that is the colouring of intervals.
    """
    size, start, end, length = boxes.size, boxes.start, boxes.end, boxes.length
    by_size = {
        "size": np.lexsort((start, -length, -size)),
        "size, start": np.lexsort((start, -size)),
        "size, end": np.lexsort((-end, -size)),
    }
    others = {
        "length": np.lexsort((start, -size, -length)),
        "area": np.lexsort((start, -_area(boxes))),
        "start": np.lexsort((-length, start)),
        "start, size": np.lexsort((-size, start)),
        "end": np.lexsort((start, -end)),
    }
    return by_size | _peak_first(boxes) | others


def _peak_first(boxes: Boxes) -> dict[str, Ints]:
    """What is live at the peak first, as a stack without gaps, then the rest.

    At the peak no byte may be wasted. With the oldest at the bottom, those live earlier are a
    prefix of the stack, and where lifetimes nest those live later are one too.
    """
    if not len(boxes):
        return {}
    size, start, end, length = boxes.size, boxes.start, boxes.end, boxes.length
    peak = int(boxes.curve.argmax())
    at_peak = (start <= peak) & (peak < end)
    stacks = {
        "oldest": np.lexsort((-end, start)),
        "longest": np.lexsort((start, -length)),
        "last": np.lexsort((start, -end)),
    }
    rests = {
        "size": np.lexsort((-length, -size)),
        "area": np.lexsort((start, -_area(boxes))),
        "length": np.lexsort((-size, -length)),
        "crowd": np.lexsort((-size, -boxes.crowd)),
    }
    return {
        f"peak by {stack_name}, then {rest_name}": np.concatenate(
            [stack[at_peak[stack]], rest[~at_peak[rest]]]
        )
        for stack_name, stack in stacks.items()
        for rest_name, rest in rests.items()
    }


def _area(boxes: Boxes) -> Floats:
    """Bytes times times, as floats: the products may exceed 64 bits."""
    return boxes.length * boxes.size.astype(np.float64)
