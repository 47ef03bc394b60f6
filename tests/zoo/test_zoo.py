"""Models as users bring them: bit-exact with the peak as predicted, whole or in parts."""

from __future__ import annotations

import pytest

from remat.graph_capture import capture
from remat.graph_capture.errors import CaptureError
from tests.zoo.catalogue import ZOO
from tests.zoo.measure import measured, measured_in_parts

MOST_ERROR = 0.01
LEAST_PLANNED = 0.8
FEWER_PLANNED = ("nn.LSTM", "x-transformers decoder, bias of T5", "x-transformers decoder, alibi")
"""What has no module to plan; and what calls parts of its modules in its own loop."""

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if not entry.refused])
def test_equal_to_eager_with_the_predicted_peak(name: str) -> None:
    entry = ZOO[name]
    if entry.is_missing:
        pytest.skip(f"{entry.needs} is not installed: pip install 'remat[zoo]'")
    row = measured(entry)
    for plan in (row.everything, row.planned):
        assert plan.check.differences == ()
        assert plan.check.gradients == plan.check.gradients_total > 0
        assert abs(plan.error) <= MOST_ERROR
    assert row.trained == []
    assert row.planned.predicted_bytes <= row.everything.predicted_bytes


@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.refused])
def test_what_is_no_one_graph_is_planned_in_parts(name: str) -> None:
    if ZOO[name].is_missing:
        pytest.skip(f"{ZOO[name].needs} is not installed: pip install 'remat[zoo]'")
    found = measured_in_parts(ZOO[name])
    assert found.planned.check.differences == ()
    assert found.trained == []
    assert found.share > LEAST_PLANNED or name in FEWER_PLANNED
    case = ZOO[name].make()
    with pytest.raises(CaptureError, match=ZOO[name].refused):
        capture(case.model, case.args, case.kwargs, loss_fn=case.loss_fn, target=case.target)
