"""A budget of what eager takes is enough, whatever op a model has."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("expecttest", reason="torch's database of ops needs it")

from tests.op_database.peaks import SLACK_BYTES, differentiable_ops, name_of, peaks_of

ABOVE: dict[str, str] = {}
"""Ops whose least plan takes more than eager, and why."""
EACH = 40
"""Of so many ops, one is tried each time the tests run."""

OPS = [op for op in differentiable_ops() if name_of(op) not in ABOVE]
SOME = [op for op in OPS[::EACH] if not op.name.startswith("linalg")]


def fits(ops: list[object]) -> tuple[int, list[str]]:
    tried, above = 0, list[str]()
    for op in ops:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = peaks_of(op)
        if found is not None:
            tried += 1
            if found.least_bytes > found.eager_bytes + SLACK_BYTES:
                above.append(f"{found.name}: {found.least_bytes} over {found.eager_bytes}")
    return tried, above


def test_some_ops_fit_into_eagers_peak() -> None:
    tried, above = fits(SOME)
    assert tried > len(SOME) // 2
    assert above == []


@pytest.mark.slow
def test_all_ops_fit_into_eagers_peak() -> None:
    tried, above = fits(OPS)
    assert tried > 0.8 * len(OPS)
    assert above == []
