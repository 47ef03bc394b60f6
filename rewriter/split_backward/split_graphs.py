"""The two parts of a backward graph, apart from how they are cut: to run them needs no solver."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from remat.rewriter.split_backward.live_bytes import SplitBytes


@dataclass(frozen=True)
class SplitGraphs:
    """The two parts of a backward graph.

    Attributes
    ----------
    inputs : I. It takes what backward takes, and returns backward's results, None in the places of
        weights, then what it carries to W.
    weights : W. It takes what is carried, and hands over gradients where `hand_over` marks it.
    n_results : of backward. places : of the results that W makes.
    live : bytes of both, of one microbatch.
    reads_tangents : whether W reads a gradient that backward is given.
    """

    inputs: fx.GraphModule
    weights: fx.GraphModule
    n_results: int
    places: tuple[int, ...]
    live: SplitBytes
    reads_tangents: bool
