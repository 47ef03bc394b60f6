"""Parts of a model on ranks of a pipeline, beside the same wrappers around eager blocks.

Run as ``torchrun --nproc-per-node N tests/distributed/pipeline/worker.py FOLDER CASE...``, with the
plans in the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel

import remat
from remat.cluster.apply import parallelize
from remat.cluster.apply.cluster_mesh import opened_plan
from remat.cluster.apply.stage_parts import rank_parts
from remat.cluster.plan_file import ClusterFile
from remat.graph_capture.devices.memory_events import measure_regions
from remat.schedules.plan import Versions

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.distributed.launch import join, leave, refused
from tests.distributed.optimizer_steps import alike, held_bytes, trained
from tests.distributed.pipeline.models import (
    VOCAB,
    Decoder,
    Skips,
    draws,
    masked,
    tensor_plan,
    token_loss,
)

FOLDER = Path(sys.argv[1])
SEQ, MICRO, MICROBATCHES = 64, 4, 8
STEPS, MEASURED = 2, 30

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Found = dict[str, Any]


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return Decoder().to(dtype)


def batch(seed: int, sequences: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randint(VOCAB, (sequences, SEQ))


def part(plan: str, *, eager: bool = False, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Any:
    """This rank's part; blocks as they are where `eager`."""
    file = FOLDER / plan
    mesh = remat.cluster.cluster_mesh(file, "cpu")
    one = batch(0, MICRO)

    def left(*args: Any, **kwargs: Any) -> Any:
        return rank_parts(*args, **kwargs, eager=eager)

    made = model(dtype).to("meta") if "materialize" in how else model(dtype)
    with mock.patch.object(parallelize, "rank_parts", left):
        return remat.cluster.parallelize(
            made, file, mesh, (one,), loss_fn=token_loss, target=one, **how
        )


def batches(seed: int = 0) -> list[Tensor]:
    return [batch(10 * seed + 1 + step, MICRO * MICROBATCHES) for step in range(STEPS)]


def peak_bytes(one: Any) -> int:
    """What parameters, receive buffers and a step hold, as measured."""
    ids = batch(1, MICRO * MICROBATCHES)
    found: list[int] = []
    for _ in range(MEASURED):
        one.zero_grad()
        regions = measure_regions([lambda: one.schedule.step(ids, target=ids)])
        found += [region.peak_bytes for region in regions]
    one.zero_grad()
    return held_bytes(one) + min(found)


def compared(
    plan: str, seed: int = 0, eager: dict[str, Tensor] | None = None, *, is_loaded: bool = False,
    **how: Any,
) -> Found:  # fmt: skip
    """A part beside the same wrappers around eager.

    Parameters
    ----------
    eager : what the eager part found, where it is known.
    is_loaded : the part is of a model on the meta device, of which each rank is given its modules.
        Its peak is not measured.
    """
    expected = trained(part(plan, eager=True, **how), batches(seed)) if eager is None else eager
    asked_for: list[str] = []
    fast = part(plan, **how, **(loading(asked_for, **how) if is_loaded else {}))
    found = trained(fast, batches(seed))
    measured = {} if is_loaded else {"measured_bytes": peak_bytes(fast)}
    return {
        "same": alike(expected, found), "n": len(found), "overhead": fast.overhead,
        "predicted_bytes": fast.peak_bytes,
        "received_bytes": [stage.received_bytes for stage in fast.schedule.stages],
        "asked_for": asked_for,
    } | measured  # fmt: skip


@cache
def eager_of_pp2() -> dict[str, Tensor]:
    return trained(part("pp2.json", eager=True), batches())


def loading(asked_for: list[str], dtype: torch.dtype = torch.bfloat16, **_: Any) -> Found:
    """Gives modules the values that they have in the whole model; notes their paths."""
    whole = dict(model(dtype).named_modules())

    def load(path: str, module: nn.Module) -> None:
        asked_for.append(path)
        module.to_empty(device="cpu").load_state_dict(whole[path].state_dict())

    return {"materialize": load}


def sharded(plan: str) -> Found:
    """Masters in float32, computation in bfloat16."""
    return compared(plan, dtype=torch.float32, mp_policy=MIXED)


def drawn() -> Found:
    plan = opened_plan(FOLDER / "pp1dp2.json")
    return applied(plan, model().to("meta"), ids=batch(0, MICRO), materialize=draws)


def plain(plan: str) -> Found:
    """Without stages: microbatches one after another, sharded by FSDP2."""
    how: Found = {"dtype": torch.float32, "mp_policy": MIXED}
    eager, found = (trained(part(plan, eager=kind, **how), batches()) for kind in (True, False))
    return {"same": alike(eager, found), "n": len(found)}


def split(plan: str) -> Found:
    """Tensor and data parallel ranks in each stage, of a model on the meta device."""
    rank = remat.cluster.cluster_mesh(FOLDER / plan, "cpu")["dp_shard"].get_local_rank()
    how = {"mp_policy": MIXED, "tp_plan": tensor_plan()}
    return compared(plan, rank, is_loaded=True, dtype=torch.float32, **how)


def applied(plan: ClusterFile, model: nn.Module, *, ids: Tensor, **how: Any) -> Found:
    """The error with which a plan is refused."""
    mesh = remat.cluster.cluster_mesh(plan, "cpu")
    given = {"loss_fn": token_loss, "target": ids} | how
    return refused(lambda: remat.cluster.parallelize(model, plan, mesh, (ids,), **given))


def with_hook() -> nn.Module:
    made = model()
    made.layers["3"].up.register_full_backward_hook(lambda *_: None)
    return made


def tied() -> nn.Module:
    made = model()
    made.out.weight = made.tok.weight
    return made


def refusals() -> Found:
    plan = opened_plan(FOLDER / "pp2.json")
    one = batch(0, MICRO)
    changed = msgspec.structs.replace
    tensor = changed(
        plan, parallelism=changed(
            plan.parallelism, tensor_parallel_degree=2, pipeline_parallel_degree=1
        ), stages=plan.stages[:1],
    )  # fmt: skip
    other = model()
    with torch.no_grad():
        other.tok.weight += dist.get_rank()
    return {
        "torch": applied(changed(plan, versions=Versions("2.0", "0")), model(), ids=one),
        "shapes": applied(plan, model(), ids=batch(0, MICRO + 1)),
        "dtype": applied(plan, model(torch.float32), ids=one),
        "microbatches": applied(changed(plan, microbatches=1), model(), ids=one),
        "schedule": applied(plan, model(), ids=one, schedule="ZBVZeroBubble"),
        "no_room": applied(changed(plan, budget_bytes=3 << 20), model(), ids=one),
        "hook": applied(plan, with_hook(), ids=one),
        "tied": applied(plan, tied(), ids=one),
        "skips": applied(plan, Skips().to(torch.bfloat16), ids=one),
        "mask": applied(plan, masked(), ids=one),
        "blocks": applied(plan, nn.Sequential(nn.Linear(4, 4)), ids=one),
        "another_model": applied(plan, other, ids=one),
        "no_tp_plan": applied(tensor, model(), ids=one),
        "replicated": applied(tensor, model(), ids=one, tp_plan={"out": ColwiseParallel()}),
        "world": refused(lambda: remat.cluster.cluster_mesh(changed(plan, gpus=4))),
        "on_meta": applied(plan, model().to("meta"), ids=one),
        "no_function": applied(plan, model().to("meta"), ids=one, materialize="weights.pt"),
        "left_on_meta": applied(
            plan, model().to("meta"), ids=one, materialize=lambda path, module: None
        ),
    }


CASES: dict[str, Callable[[], Found]] = {
    "1f1b": lambda: compared("pp2.json", eager=eager_of_pp2()),
    "refused": refusals,
    "loaded": lambda: compared("pp2.json", eager=eager_of_pp2(), is_loaded=True),
    "drawn": drawn,
    "gpipe": lambda: compared("wide.json", schedule="GPipe"),
    "interleaved": lambda: compared("interleaved.json", schedule="Interleaved1F1B"),
    "looped": lambda: compared("wide_interleaved.json", schedule="LoopedBFS"),
    "zero_bubble": lambda: compared("zero_bubble.json"),
    "zbv": lambda: compared("wide_interleaved.json", schedule="ZBVZeroBubble"),
    "dualpipe": lambda: compared("wide_interleaved.json", schedule="DualPipeV"),
    "sharded": lambda: sharded("pp2dp2.json"),
    "plain": lambda: plain("pp1dp2.json"),
    "split": lambda: split("pp2dp2tp2.json"),
}

if __name__ == "__main__":
    join()
    leave(FOLDER, {name: CASES[name]() for name in sys.argv[2:] or CASES})
