"""What audits cost is measured and said; on a tiny model here, whose figures mean nothing."""

from __future__ import annotations

from benchmarks.running.audits import audits_row, audits_text
from examples.gpt import Sizes

TINY = Sizes(layers=2, width=16, heads=2, seq=8, batch=1, vocab=32, dropout=0.0)


def test_a_row_for_a_gpt() -> None:
    row = audits_row(TINY, steps=4, budget="100%")
    assert 0 < row["of_later_ones"] < row["of_first_thousand"]
    assert row["of_first_thousand"] == 10 * row["audit_us"] / (1000 * row["step_us"])
    assert audits_text(row).startswith("audits of GPT, 2 layers: ")
