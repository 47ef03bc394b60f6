"""What the guards cost is measured and said; on tiny models here, whose figures mean nothing."""

from __future__ import annotations

from benchmarks.running.guards import guards_rows, guards_text
from examples.gpt import Sizes

TINY = Sizes(layers=2, width=16, heads=2, seq=8, batch=1, vocab=32, dropout=0.0)


def test_a_row_for_a_gpt_and_one_for_many_modules() -> None:
    gpt, chain = guards_rows(3, TINY, modules=10)
    assert 0 < gpt["python_state_us"] < gpt["guards_us"]
    assert chain["modules"] == 11
    assert chain["share"] == chain["guards_us"] / chain["eager_us"]
    assert guards_text(gpt).startswith("guards of GPT, 2 layers: ")
    assert "for Python's state (11 modules)" in guards_text(chain)
