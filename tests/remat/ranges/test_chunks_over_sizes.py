"""Heads in chunks within plans over a range of sizes: exact, within the budget, few plans."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import remat
from remat.graph_capture.chunking import same_bits as comparing
from remat.graph_capture.chunking.blocks import largest_block
from remat.graph_capture.chunking.head import Head
from remat.graph_capture.chunking.regions import RegionCandidate
from remat.graph_capture.errors import RewriteError, TooLargeError
from remat.graph_capture.graph import Op
from remat.graph_capture.sizes.ranged_chunks import ChunkPoint, RangedChoice
from remat.rewriter.user_module.ranged import RangedModule
from tests.beside_eager import require_as_planned, require_eagers_steps, same_bits
from tests.sized_models import Gpt

WORDS, LONGEST = 2000, 128
SEQ = {1: ("seq", 16, LONGEST)}
DYNAMIC = {"tokens": SEQ, "targets": SEQ}


def made() -> Gpt:
    torch.manual_seed(0)
    return Gpt(words=WORDS, longest=LONGEST)


def batch(length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(WORDS, (2, 4, length), generator=drawn)
    return tokens, targets


def planned(model: nn.Module, budget: Any = "40%", **options: Any) -> Any:
    asked = {"dynamic": DYNAMIC, "split": "exact", "check": False, "solver": "cut", **options}
    return remat.rematerialize(model, batch(LONGEST), budget=budget, verbose=False, **asked)


@pytest.fixture(scope="module")
def both() -> tuple[Gpt, RangedModule]:
    model = made()
    return model, planned(model)


def chunks_of(module: RangedModule) -> list[int]:
    """Of each schedule, the number of chunks; 0 for whole heads."""
    found = [member.schedule.chunks for member in module.family.members]
    return [chunks[0].chunks if chunks else 0 for chunks in found]


def test_small_sizes_run_whole_and_large_ones_in_chunks(both: tuple[Gpt, RangedModule]) -> None:
    model, module = both
    assert chunks_of(module)[0] == 0
    assert chunks_of(module)[-1] > 0
    for length in (16, 17, 51, 80, 97, LONGEST - 1, LONGEST):
        require_as_planned(model, module, batch(length), seq=length)


def test_five_steps_are_those_of_eager() -> None:
    eager, model = made(), made()
    require_eagers_steps(eager, model, planned(model), batch, (LONGEST, 70, 23))


def test_updates_in_backward_and_accumulation_go_with_both() -> None:
    eager, model = made(), made()
    own, optimizer = (torch.optim.AdamW(one.parameters()) for one in (eager, model))
    module = planned(model, "60%", optimizer_in_backward=optimizer)
    assert max(chunks_of(module)) > 0
    assert any(member.schedule.updates for member in module.family.members)
    for length in (LONGEST, 70, 23):
        torch.manual_seed(length)
        eager(*batch(length)).backward()
        own.step()
        own.zero_grad()
        torch.manual_seed(length)
        module(*batch(length)).backward()
    for theirs, ours in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(theirs, ours)


@pytest.mark.slow
def test_it_needs_little_more_than_a_plan_for_the_largest_size_alone() -> None:
    ranged = planned(made(), "min")
    alone = planned(made(), "min", dynamic=None)
    assert ranged.family.peak_bytes <= 1.1 * remat.plans(alone)[0].peak_bytes


def test_a_large_head_runs_in_chunks_only_where_that_helps() -> None:
    assert chunks_of(planned(made(), "40%", split=None))[-1] > 0
    assert planned(made(), "100%", split=None).ranged_graph.choices == ()
    with pytest.raises(TooLargeError, match="plan a range up to seq"):
        planned(made(), "40%", split="none")


def test_a_cache_learns_the_range_and_has_few_plans() -> None:
    model = made()
    cache: Any = remat.rematerialize(
        model, budget="40%", dynamic="auto", upto={"tokens": {1: LONGEST}}, split="exact",
        check=False, verbose=False,
    )  # fmt: skip
    for length in (70, 23, LONGEST, 90, 16, 127):
        assert same_bits(model, cache, batch(length))
    plans = remat.plans(cache)
    assert len(plans) <= 3
    assert any(one.schedule.chunks for plan in plans if plan.family for one in plan.family.members)


def test_a_number_of_chunks_without_eagers_bits_at_some_size_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compared: set[int] = set()
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))

    def matches(found: RegionCandidate) -> bool:
        (head,) = found.parts
        assert isinstance(head, Head)
        compared.add(rows := len(head.softmax.meta["val"]))
        return found.chunks < 8 or rows >= 4 * LONGEST

    monkeypatch.setattr(comparing, "matches_eager_bitwise", matches)
    monkeypatch.setattr(comparing, "_known", {})
    module = planned(made())
    assert {one.chunks for one in module.ranged_graph.choices} == {2, 4}
    assert {4 * 16, 4 * (LONGEST - 1), 4 * LONGEST} < compared
    monkeypatch.setattr(comparing, "matches_eager_bitwise", lambda found: False)
    comparing._known.clear()
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path / "anew"))
    with pytest.warns(UserWarning, match="stays whole: in chunks its bits would differ"):
        assert planned(made(), "100%").ranged_graph.choices == ()


class Shifted(Gpt):
    """Reads the logits of all tokens but the last."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)[:, :-1]
        return cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())


def test_a_loss_of_some_rows_stays_whole_and_says_so() -> None:
    with pytest.warns(UserWarning, match="stays whole over a range: it reads a part of the rows"):
        module = planned(Shifted(words=WORDS, longest=LONGEST), "95%")
    assert module.ranged_graph.choices == ()


def test_a_family_in_chunks_is_kept_and_copied(
    both: tuple[Gpt, RangedModule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, module = both
    remat.plans(module)[0].save(tmp_path / "plan.json")
    kept = remat.load(tmp_path / "plan.json")
    for one in (kept.apply(model), pickle.loads(pickle.dumps(module))):
        own = model if one is not module else module
        assert same_bits(own, one, batch(LONGEST))
        assert same_bits(own, one, batch(23))
    monkeypatch.setattr(comparing, "matches_eager_bitwise", lambda found: False)
    monkeypatch.setattr(comparing, "_known", {})
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RewriteError, match="plan here, or with split='tolerance'"):
        kept.apply(model)


def test_a_workspace_is_bounded_between_the_measured_sizes() -> None:
    chunks = 4

    def bytes_of(n: int) -> int:  # the most of three moments
        block = largest_block(n, chunks)
        return max(800 * block + 13 * n, 300 * n, 12 * block + 40_000)

    op = Op("head", "remat.linear_cross_entropy", "forward", (), ("loss",))
    points = tuple(ChunkPoint((1.0,), (bytes_of(n),), (n,)) for n in (64, 128, 181, 300, 512))
    choice = RangedChoice("head", chunks, True, (), (("", op),), (), {}, ("n",), points)

    def made_at(n: int, *, is_bound: bool) -> int:
        ((_, found),) = choice.at(lambda _: n, lambda _: n, int, is_bound=is_bound).ops
        return found.workspace_bytes

    for n in range(64, 513):
        assert made_at(n, is_bound=True) >= max(map(bytes_of, range(64, n + 1)))
    for n in range(128, 513):
        assert made_at(n, is_bound=False) <= 1.1 * bytes_of(n)
