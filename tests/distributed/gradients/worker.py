"""Gradients of parts on ranks, beside those of the whole model on one rank.

Run as ``torchrun --nproc-per-node N tests/distributed/gradients/worker.py FOLDER CASE...``, with
the plans in the folder.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import remat

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.distributed.gradients.models import IGNORED, LOSSES, MAKES, SEQ, Attends, Given
from tests.distributed.launch import join, leave, refused
from tests.distributed.pipeline.models import VOCAB

FOLDER = Path(sys.argv[1])
MICRO, MICROBATCHES = 2, 4
Found = dict[str, Any]
Batch = tuple[Tensor, Tensor]


class Both:
    """A part, and the whole model on this rank alone."""

    def __init__(
        self, plan: str, made: Callable[[], nn.Module], loss: str = "mean", **how: Any
    ) -> None:
        file = FOLDER / plan
        self.mesh = remat.cluster.cluster_mesh(file, "cpu")
        torch.manual_seed(0)
        model = made().to(torch.bfloat16)
        self.alone = copy.deepcopy(model)
        self.loss = LOSSES[loss]()
        own = copy.deepcopy(self.loss)
        ids = torch.zeros(MICRO, SEQ, dtype=torch.int64)
        self.part = remat.cluster.parallelize(
            model, file, self.mesh, (ids,), loss_fn=own, target=ids, **how
        )
        self.replicas = self.mesh["dp_shard"].size()

    def batches(self, seed: int, ignored: Sequence[float] = ()) -> list[Batch]:
        """A batch for each replica; `ignored` : shares of microbatches that do not count."""
        stream = torch.Generator().manual_seed(seed)
        found: list[Batch] = []
        for replica in range(self.replicas):
            ids = torch.randint(VOCAB, (MICRO * MICROBATCHES, SEQ), generator=stream)
            target = ids.clone()
            for i, share in enumerate(ignored):
                # Most of what is left out comes first: context ranks have unlike numbers.
                rows = slice(MICRO * i, MICRO * (i + 1))
                target[rows, : int(share * SEQ * (1 + replica) / 2)] = IGNORED
            found.append((ids, target))
        return found

    def step(self, batches: list[Batch], seed: int = 0) -> list[float]:
        """The part's losses."""
        ids, target = batches[self.mesh.get_local_rank("dp_shard")]
        losses: list[Tensor] = []
        torch.manual_seed(seed)
        self.part.schedule.step(ids, target=target, losses=losses)
        return [loss.item() for loss in losses]

    def step_alone(self, batches: list[Batch], seed: int = 0) -> list[float]:
        """Losses of all replicas in turn, one rank's."""
        losses: list[float] = []
        for ids, target in batches:
            torch.manual_seed(seed)
            for pair in zip(ids.split(MICRO), target.split(MICRO), strict=True):
                loss = self.loss(self.alone(pair[0]), pair[1])
                (loss / (MICROBATCHES * self.replicas)).backward()
                losses.append(loss.item())
        return losses

    def zero_grad(self) -> None:
        self.part.zero_grad()
        self.alone.zero_grad()
        if isinstance(self.loss, nn.Module):
            self.loss.zero_grad()

    @property
    def off(self) -> float:
        """The largest distance of a gradient over its norm."""
        named = dict(self.alone.named_parameters())
        if isinstance(self.loss, nn.Module):
            named |= {f"loss_fn.{name}": p for name, p in self.loss.named_parameters()}
        worst = 0.0
        for name, p in self.part.named_parameters():
            expected = named[name].grad
            if expected is None or name.endswith("k.bias"):  # attention does not depend on it
                continue
            assert p.grad is not None, name
            found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            off = (found.float() - expected.float()).norm() / expected.float().norm()
            worst = max(worst, float("inf") if off.isnan() else float(off))
        return worst

    def without_dropout(self) -> None:
        """Ranks of a pipeline do not draw as one rank does; the blocks still follow their plan."""
        self.set("training", False)

    def set(self, name: str, value: Any) -> None:
        for one in (self.alone, *self.part.modules):
            setattr(one, name, value)


def given(plan: str, makes: str, *, is_eval: bool = False) -> Found:
    return moved(Both(plan, partial(Given, MAKES[makes])), is_eval=is_eval)


def moved(both: Both, *, is_eval: bool) -> Found:
    """Three steps, with a rate, a temperature and a configuration that are moved between them."""
    if is_eval:
        both.without_dropout()
    found: Found = {"off": 0.0, "losses": []}
    for seed in range(3):
        both.zero_grad()
        pairs = both.step(both.batches(seed), seed), both.step_alone(both.batches(seed), seed)
        found["losses"].append(pairs)
        found["off"] = max(found["off"], both.off)
        both.set("alpha", 0.25 + seed)
        both.set("temperature", 2.0 + seed)
        for one in (both.alone, *both.part.modules):
            one.config.scale = 0.5 + seed
    return found


def accumulated(plan: str, **how: Any) -> Found:
    both = Both(plan, Given, "learned", **how)
    both.without_dropout()
    found: Found = {}
    for seed in range(3):
        both.step(both.batches(seed))
        both.step_alone(both.batches(seed))
        found[f"off {seed}"] = both.off
    return found


def losses(plan: str, made: Callable[[], nn.Module], *names: str) -> Found:
    found: Found = {}
    for name in names:
        both = Both(plan, made, name)
        both.without_dropout()
        for what, shares in IGNORED_SHARES.items():
            both.zero_grad()
            batches = both.batches(1, shares)
            both.step(batches)
            both.step_alone(batches)
            found[f"{name} {what}"] = both.off
    return found


IGNORED_SHARES = {
    "all count": (), "uneven": (0.9, 0.1, 0.5, 0.0), "a rank without": (0.99, 0.5, 0.5, 0.6),
}  # fmt: skip


def evaluated(plan: str, **how: Any) -> Found:
    """Losses between steps, before and after an update and after weights are loaded."""
    both = Both(plan, Given, **how)
    found: Found = {}

    def look(what: str) -> None:
        batches = both.batches(7)
        ids, target = batches[both.mesh.get_local_rank("dp_shard")]
        said: list[Tensor] = []
        both.without_dropout()
        both.part.schedule.eval(ids, target=target, losses=said)
        with torch.no_grad():
            pairs = zip(ids.split(MICRO), target.split(MICRO), strict=True)
            expected = [both.loss(both.alone(a), b).item() for a, b in pairs]
        pairs = zip([one.item() for one in said], expected, strict=False)
        found[f"{what} loss"] = max([abs(a - b) for a, b in pairs], default=0.0)
        both.zero_grad()
        both.step(batches)
        both.step_alone(batches)
        found[f"{what} off"] = both.off

    look("first")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (both.part, both.alone)]
    look("again")
    for optimizer in optimizers:
        optimizer.step()
    look("updated")
    kept = [copy.deepcopy(module.state_dict()) for module in both.part.modules]
    before = copy.deepcopy(both.alone.state_dict())
    for optimizer in optimizers:
        optimizer.step()
    look("updated again")
    both.alone.load_state_dict(before)
    for module, state in zip(both.part.modules, kept, strict=True):
        module.load_state_dict(state)
    look("loaded")
    with torch.no_grad():
        found["step"] = refused(lambda: both.step(both.batches(0)))
    look("refused")
    return found


def refusals(plan: str) -> Found:
    ids = torch.zeros(MICRO * MICROBATCHES + 1, SEQ, dtype=torch.int64)
    both = Both(plan, Given)
    step = both.part.schedule.step
    found = {
        "batch": refused(lambda: step(ids, target=ids)),
        "length": refused(lambda: step(ids[:-1, 1:], target=ids[:-1, 1:])),
    }
    for makes in ("drawn", "padding", "learned"):
        found[makes] = refused(lambda one=makes: Both(plan, partial(Given, MAKES[one])))
    return found


def copies(plan: str) -> Found:
    both = Both(plan, Given)
    both.without_dropout()
    made = copy.deepcopy(both.part.modules[0])
    with torch.no_grad():
        for p in both.part.modules[0].parameters():
            p.zero_()
    ids = both.batches(0)[0][0][:MICRO]
    border = torch.ones(MICRO, SEQ, 64, dtype=torch.bfloat16)
    given = ids if dist.get_rank() == 0 else border
    with torch.no_grad():
        one, other = (m(given, remat_target=ids) for m in (made, both.part.modules[0]))
    return {"apart": not torch.equal(one, other)}


CASES: dict[str, Callable[[], Found]] = {
    **{f"one {name}": partial(given, "one.json", name) for name in MAKES},
    **{f"dp2 {name}": partial(given, "dp2.json", name) for name in ("drawn", "padding", "gated")},
    **{f"pp2 {name}": partial(given, "pp2.json", name, is_eval=True) for name in
       ("positions", "rate", "counted")},
    "cp2 rate": lambda: moved(Both("cp2.json", Attends), is_eval=True),
    "pp2cp2 rate": lambda: moved(Both("pp2cp2.json", Attends), is_eval=True),
    "one accumulated": lambda: accumulated("one.json"),
    "dp2 accumulated": lambda: accumulated("dp2.json"),
    "pp2 accumulated": lambda: accumulated("pp2.json"),
    "zero_bubble accumulated": lambda: accumulated("zero_bubble.json"),
    "zbv accumulated": lambda: accumulated("zero_bubble.json", schedule="ZBVZeroBubble"),
    "one losses": lambda: losses("one.json", Given, *LOSSES),
    "dp2 losses": lambda: losses("dp2.json", Given, "mean", "sum", "learned"),
    "pp2 losses": lambda: losses("pp2.json", Given, "mean", "sum", "learned"),
    "cp2 losses": lambda: losses("cp2.json", Attends, *LOSSES),
    "one evaluated": lambda: evaluated("one.json"),
    "dp2 evaluated": lambda: evaluated("dp2.json"),
    "pp2 evaluated": lambda: evaluated("pp2.json"),
    "zero_bubble evaluated": lambda: evaluated("zero_bubble.json"),
    "zbv evaluated": lambda: evaluated("zero_bubble.json", schedule="ZBVZeroBubble"),
    "pp2 refused": lambda: refusals("pp2.json"),
    "one copied": lambda: copies("one.json"),
    "pp2 copied": lambda: copies("pp2.json"),
    "pp2 moved": lambda: refused(lambda: given("pp2.json", "moved", is_eval=True)),
    # What comes behind a pipeline is sized from a trace, which takes no rows that a mask picks.
    "pp2cp2 losses": lambda: losses(
        "pp2cp2.json", Attends, *(name for name in LOSSES if name != "picked")
    ),
    "dp2cp2 losses": lambda: losses("dp2cp2.json", Attends, "mean", "smoothed", "learned"),
    "pp2dp2 losses": lambda: losses("pp2dp2.json", Given, "mean", "learned"),
    "pp2dp2 evaluated": lambda: evaluated("pp2dp2.json"),
}  # fmt: skip

if __name__ == "__main__":
    join()
    leave(FOLDER, {name: CASES[name]() for name in sys.argv[2:] or CASES})
