"""Module paths that differ only in their indices, written as one: ``layers.0-11``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

INDEX = "#"
"""What stands for an index in the pattern of a path."""
DASH = "\u2013"

Indices = tuple[int, ...]
T = TypeVar("T")


def split_indices(module: str) -> tuple[str, Indices]:
    """The pattern of a path and its indices: ``a.#.b`` and ``(3,)`` of ``a.3.b``."""
    parts = module.split(".")
    pattern = ".".join(INDEX if part.isdecimal() else part for part in parts)
    return pattern, tuple(int(part) for part in parts if part.isdecimal())


def boxes(indices: Iterable[Indices]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Part a set of index tuples, all of one length, into products of sets of indices.

    A set that is a product, such as ``stages.0-3.0-1``, stays whole. Otherwise outer indices with
    the same inner indices stand together.
    """
    whole = sorted(set(indices))
    if whole == [()]:
        yield ()
        return
    tails: dict[int, list[Indices]] = {}
    for first, *rest in whole:
        tails.setdefault(first, []).append(tuple(rest))
    firsts: dict[tuple[Indices, ...], list[int]] = {}
    for first, inner in tails.items():
        firsts.setdefault(tuple(inner), []).append(first)
    for inner, outer in firsts.items():
        for box in boxes(inner):
            yield (tuple(outer), *box)


def inside(by_index: Mapping[Indices, T], box: tuple[tuple[int, ...], ...]) -> list[T]:
    """What stands at the indices of a product, in order."""
    return [
        one
        for indices, one in by_index.items()
        if all(index in part for index, part in zip(indices, box, strict=True))
    ]


def written(pattern: str, box: tuple[tuple[int, ...], ...]) -> str:
    """The path of a product: ``stages.0-3.0-1.conv1``."""
    parts = iter(box)
    return ".".join(
        ranges_text(next(parts)) if part == INDEX else part for part in pattern.split(".")
    )


def ranges_text(indices: tuple[int, ...]) -> str:
    """``0-5``, ``0,2,4``, ``0-2,5`` of rising indices."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}{DASH}{run[-1]}" for run in runs)
