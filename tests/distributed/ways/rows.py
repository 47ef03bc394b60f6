"""The ways of training that docs/distributed.md lists, one a row."""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import remat
from tests.block_models import WIDTH, Stack
from tests.distributed.ways import parts
from tests.distributed.ways.trial import LR, PARTS, STEPS, Side, Way, steps, wrapped

ALL, EVERY = "DdBFfZ", "DdBFfZPQ"
_UNEVEN = 64  # rows of a batch that one rank alone has


class Odd(Stack):
    """Of sizes that ranks cannot share out evenly: 65 columns, a row, and a tied map."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, WIDTH + 1)
        self.row = nn.Parameter(torch.ones(1, WIDTH + 1))
        self.narrow = nn.Linear(WIDTH + 1, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH + 1, WIDTH, bias=False)
        self.tied.weight = self.narrow.weight

    def forward(self, x: Tensor, *, learn: bool = True) -> Tensor:
        wide = self.widen(x) * self.row
        return super().forward(self.narrow(wide) + self.tied(wide.sin()))


class Normed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, *, learn: bool = True) -> Tensor:
        return super().forward(self.norm(x))


class Unused(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)


# What both sides do.


def uneven(side: Side) -> None:
    for seed in range(4):
        is_other = seed == 2 and dist.get_rank() == 1
        side.backward(seed, side.x[:_UNEVEN] if is_other else side.x)
        side.update()


def last_batch(side: Side) -> None:
    for n_rows in (256, 256, 96):
        side.backward(n_rows, side.x[:n_rows])
        side.update()


def joined(side: Side) -> None:
    with Join([side.model]):  # pyright: ignore
        for seed in range(3 + dist.get_rank()):
            side.backward(seed)
            side.optimizer.step()
            side.optimizer.zero_grad()
    dist.barrier()
    side.seen = [p.detach().clone() for p in side.model.parameters()]


def clipped(side: Side) -> None:
    for seed in range(STEPS):
        side.backward(seed)
        norm: Any = nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)
        side.seen.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        side.update()


def kept_and_loaded(side: Side) -> None:
    side.optimizer = torch.optim.AdamW(side.model.parameters(), lr=LR)
    steps(side)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    model, states = get_state_dict(side.model, side.optimizer)
    dcp.save({"model": model, "optimizer": states}, checkpoint_id=folder[0])
    steps(side)
    dcp.load({"model": model, "optimizer": states}, checkpoint_id=folder[0])
    set_state_dict(side.model, side.optimizer, model_state_dict=model, optim_state_dict=states)
    steps(side)
    side.optimizer = torch.optim.SGD(side.model.parameters(), lr=LR)


def averaged(side: Side) -> None:
    named = [*side.model.named_parameters()]
    groups = [
        {"params": [p for name, p in named if ("bias" in name) == is_bias], "weight_decay": decay}
        for is_bias, decay in ((True, 0.0), (False, 0.1))
    ]
    side.optimizer = torch.optim.AdamW(groups, lr=LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(side.optimizer, LR, total_steps=STEPS)
    average = None
    if not side.is_fsdp:
        average = AveragedModel(side.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for seed in range(STEPS):
        side.backward(seed)
        side.update()
        schedule.step()
        if average is not None:
            average.update_parameters(side.model)
    if average is not None:
        side.seen += [p.detach() for p in average.parameters()]


def summed_step(side: Side) -> None:
    for seed in range(2):
        with side.unsynced():
            side.backward(seed)
    side.backward(2)


def summed(side: Side) -> None:
    for _ in range(2):
        summed_step(side)
        side.update()


def reduced_each_step(side: Side) -> None:
    side.backward(0)
    side.backward(1)


def reduced_each(side: Side) -> None:
    for _ in range(2):
        reduced_each_step(side)
        side.update()


def frozen_later(side: Side) -> None:
    steps(side)
    side.inner.get_submodule("first").requires_grad_(False)
    steps(side)


def evaluated(side: Side) -> None:
    for seed in range(STEPS):
        side.backward(seed)
        side.update()
        side.model.eval()
        with torch.no_grad():
            side.seen.append(side.forward(seed))
        side.model.train()


def zeroed(side: Side) -> None:
    for seed in range(STEPS):
        side.backward(seed)
        side.note()
        side.optimizer.step()
        side.optimizer.zero_grad(set_to_none=False)


def twice(side: Side) -> None:
    for seed in range(STEPS):
        loss = side.forward(seed) + side.forward(seed + 9, side.x.flip(0))
        loss.backward()
        side.update()


def autocast_step(side: Side, seed: int = 0) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = side.forward(seed)
    loss.backward()
    side.seen.append(loss.detach())


def in_autocast(side: Side) -> None:
    for seed in range(STEPS):
        autocast_step(side, seed)
        side.update()


def compressed(side: Side) -> None:
    side.model.register_comm_hook(None, default_hooks.fp16_compress_hook)  # pyright: ignore
    steps(side)


def prefetched(side: Side) -> None:
    layers: Any = [*side.inner.get_submodule("layers").children()]
    for one, following in itertools.pairwise(layers):
        one.set_modules_to_forward_prefetch([following])
    steps(side)


# How models are changed, planned and wrapped.


def frozen(path: str, model: nn.Module) -> nn.Module:
    model.get_submodule(path).requires_grad_(False)
    return model


def one_bias_a_block(model: nn.Module) -> nn.Module:
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith("layers") or name.endswith("down.bias"))
    return model


def root_alone(_: str, model: nn.Module) -> nn.Module:
    return fully_shard(model)


def in_pairs(_: str, model: nn.Module) -> nn.Module:
    layers = [*model.get_submodule("layers").children()]
    for i in range(0, len(layers), 2):
        fully_shard(layers[i : i + 2])  # pyright: ignore
    return fully_shard(model)


def in_ddp(_: str, model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def without_scale(column: str, model: nn.Module) -> nn.Module:
    return wrapped(column, model, ignored_params={model.get_parameter("scale")})


def by_columns(_: nn.Parameter) -> Any:
    return Shard(1) if _.dim() > 1 else Shard(0)


def policy(column: str) -> dict[str, Any]:
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {"mp_policy": mixed}


def mixed(_: str) -> dict[str, Any]:
    return {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


def two_by_two(_: str) -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


def always(**given: Any) -> Callable[[str], dict[str, Any]]:
    return lambda _: given


def wrapped_first(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded_first(model: nn.Module) -> nn.Module:
    return wrapped("Z", model)


def in_bytes(column: str) -> dict[str, Any]:
    return {"budget": "2900KiB"}


def grouped(_: str) -> dict[str, Any]:
    return {"group": dist.group.WORLD}


def untold(_: str) -> dict[str, Any]:
    return {"sharding": remat.Sharding(), "group": None}


WAYS: tuple[Way, ...] = (
    Way("three steps", EVERY, of_part=parts.one_step),
    Way("batches of one rank alone smaller", "d", uneven),
    Way("the same with group=", "d", uneven, asked=grouped),
    Way("a smaller last batch", EVERY, last_batch, step=None, of_part=parts.smaller),
    Way("ranks with 3 and 4 steps (Join)", "DdB", joined),
    Way("clip_grad_norm_", EVERY, clipped, of_part=parts.clipped),
    Way("distributed.checkpoint, kept and loaded", ALL, kept_and_loaded),
    Way("OneCycleLR, decay by name, EMA", ALL, averaged),
    Way("each of two batches reduced", "DBFZPQ", reduced_each, reduced_each_step,
        asked=always(accumulate=True), of_part=parts.two_steps_summed),
    Way("gradients summed unsynced, told", "DBFZ", summed, summed_step,
        told=always(gradient_sync=False)),
    Way("summed unsynced, accumulate= told alone", "DBFZ", summed, summed_step,
        asked=always(accumulate=True)),
    Way("summed unsynced, not told", ALL, summed, summed_step),
    Way("no_sync, views of buckets", "DdB", summed, summed_step,
        how=always(gradient_as_bucket_view=True),
        told=always(bucket_views=True, gradient_sync=False)),
    Way("65 columns, a row, a tied map", ALL, made=Odd),
    Way("frozen first map", ALL, before=partial(frozen, "first")),
    Way("frozen block", ALL, before=partial(frozen, "layers.0")),
    Way("one bias a block trained", ALL, before=one_bias_a_block),
    Way("frozen after three steps", "FfZ", frozen_later, step=None),
    Way("bfloat16 policy", "FfZ", how=policy, told=mixed),
    Way("bfloat16 policy, not told", "FZ", how=policy),
    Way("bfloat16 autocast", "d", in_autocast, autocast_step),
    Way("reshard_after_forward=False", "FfZ", how=always(reshard_after_forward=False),
        told=always(reshard_after_forward=False)),
    Way("reshard_after_forward=False, not told", "Z", how=always(reshard_after_forward=False)),
    Way("CPUOffloadPolicy", "Z", how=always(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        told=always(cpu_offload=True)),
    Way("Shard(1)", "FfZ", how=always(shard_placement_fn=by_columns)),
    Way("HSDP, 2 x 2", "FfZ", how=two_by_two, told=always(replicas=2), n_ranks=4),
    Way("HSDP, not told", "Z", how=two_by_two, n_ranks=4),
    Way("root alone wrapped", "Z", wrap=root_alone),
    Way("two blocks in a group", "Z", wrap=in_pairs),
    Way("DDP around an FSDP2 plan", "FZ", wrap=in_ddp),
    Way("FSDP2 around a DDP plan", "DB", wrap=lambda _, model: wrapped("Z", model)),
    Way("prefetch set", "Z", prefetched),
    Way("ignored_params", "FfZ", wrap=without_scale),
    Way("batch norm", "DdB", made=Normed),
    Way("evaluation between steps", ALL, evaluated),
    Way("zero_grad(set_to_none=False)", ALL, zeroed),
    Way("two forwards, one backward", ALL, twice),
    Way("find_unused_parameters, a layer unused", "DdB", made=Unused,
        how=always(find_unused_parameters=True)),
    Way("static_graph, views of buckets", "DdB",
        how=always(static_graph=True, gradient_as_bucket_view=True),
        told=always(bucket_views=True)),
    Way("views of buckets told, not given", "DB", told=always(bucket_views=True)),
    Way("fp16 compression hook", "DdB", compressed),
    Way("sharding= not said", "DB", asked=untold),
    Way("a budget in bytes", "d", asked=in_bytes),
    Way("copy.deepcopy before the wrapper", ALL, between=copy.deepcopy, step=None),
    Way("a loss with a parameter", PARTS, of_part=parts.loss_with_a_parameter),
    Way("wrapped by DDP first", "Dd", first=wrapped_first),
    Way("sharded first", "fZ", first=sharded_first),
)  # fmt: skip
