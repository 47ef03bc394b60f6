"""What people do to a module that they train. Each takes a `Trainee` and says what came of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.behaviours.trainee import Observed, Trainee, read_again


def one_step(it: Trainee) -> Observed:
    return it.observed(loss=it.step())


def gradient_accumulation(it: Trainee) -> Observed:
    return it.observed(losses=[it.step(i) for i in range(3)])


def interleaved_forwards_and_backwards(it: Trainee) -> Observed:
    first, second = it.loss(0), it.loss(1)
    second.backward()
    first.backward()
    return it.observed(losses=[first.detach(), second.detach()])


def one_backward_of_two_forwards(it: Trainee) -> Observed:
    (it.loss(0) + it.loss(1)).backward()
    return it.observed()


def retain_graph(it: Trainee) -> Observed:
    loss = it.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    return it.observed()


def gradients_of_some_parameters(it: Trainee) -> Observed:
    wanted = [p for p in it.module.parameters() if p.requires_grad][::2]
    found = torch.autograd.grad(it.loss(), wanted, allow_unused=True)
    it.loss(1).backward(inputs=wanted)
    return it.observed(found=list(found))


def backward_from_one_output(it: Trainee) -> Observed:
    it.outputs()[0].float().mean().backward()
    return it.observed()


def parameter_hooks(it: Trainee) -> Observed:
    calls: list[str] = []
    for name, parameter in it.module.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda g, name=name: calls.append(name) or 2 * g)
    it.step()
    return it.observed(calls=sorted(calls))


def optimizer_in_backward(it: Trainee) -> Observed:
    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in it.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(update)
    it.step(0)
    it.step(1)
    return it.observed()


def hooks_on_the_whole_module(it: Trainee) -> Observed:
    calls: list[Any] = []
    it.module.register_forward_pre_hook(lambda m, args: calls.append(len(args)))
    it.module.register_forward_hook(lambda m, args, out: calls.append(type(out).__name__))
    it.module.register_full_backward_hook(lambda m, *_: calls.append("backward"))
    it.step()
    return it.observed(calls=calls)


def _train(it: Trainee, optimizer: Optimizer, *, set_to_none: bool, steps: int = 3) -> list[Tensor]:
    losses: list[Tensor] = []
    for i in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(it.step(i))
        nn.utils.clip_grad_norm_(it.module.parameters(), 0.5)
        optimizer.step()
    return losses


def adamw_with_clipping(it: Trainee) -> Observed:
    optimizer = AdamW(it.module.parameters(), lr=1e-2)
    return it.observed(losses=_train(it, optimizer, set_to_none=True))


def sgd_with_zeroed_gradients(it: Trainee) -> Observed:
    optimizer = SGD(it.module.parameters(), lr=1e-2, momentum=0.9)
    return it.observed(losses=_train(it, optimizer, set_to_none=False))


def gradient_scaler(it: Trainee) -> Observed:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = SGD(it.module.parameters(), lr=1e-2)
    for i in range(2):
        optimizer.zero_grad()
        scaler.scale(it.loss(i)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return it.observed(scale=scaler.get_scale())


def anomaly_mode(it: Trainee) -> Observed:
    with torch.autograd.detect_anomaly(check_nan=True):
        it.step()
    return it.observed()


def saved_tensors_hooks(it: Trainee) -> Observed:
    with graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        loss = it.loss()
    loss.backward()
    with graph.save_on_cpu():
        it.step(1)
    return it.observed()


def eval_and_no_grad_between_steps(it: Trainee) -> Observed:
    it.step(0)
    it.module.eval()
    with torch.no_grad():
        quiet = it.module(*it.batch(1), **it.kwargs)
    it.module.train()
    with torch.inference_mode():
        it.module(*it.batch(2), **it.kwargs)
    it.step(1)
    return it.observed(kind=type(quiet).__name__)


def deep_copy_in_training(it: Trainee) -> Observed:
    it.step(0)
    other = it.with_module(copy.deepcopy(it.module))
    other.step(1)
    kept = other.observed()
    it.step(2)
    return {**it.observed(), **{f"copy: {name}": value for name, value in kept.items()}}


def shallow_copy(it: Trainee) -> Observed:
    other = it.with_module(copy.copy(it.module))
    other.step(0)
    return it.observed()


def pickled_in_training(it: Trainee) -> Observed:
    it.step(0)
    for again in (read_again, lambda module: pickle.loads(pickle.dumps(module))):
        it = it.with_module(again(it.module))
        it.step(1)
    return it.observed()


def pickled_in_eval_mode(it: Trainee) -> Observed:
    again = it.with_module(read_again(it.module.eval()))
    assert not again.module.training
    again.module.train()
    again.step()
    return again.observed()


def two_instances(it: Trainee) -> Observed:
    one, other = it.with_module(copy.deepcopy(it.module)), it
    losses = [one.loss(0), other.loss(1), one.loss(2)]
    for loss in losses:
        loss.backward()
    return {**one.observed(), **{f"other: {n}": v for n, v in other.observed().items()}}


def averaged_model(it: Trainee) -> Observed:
    average = AveragedModel(it.module)
    optimizer = SGD(it.module.parameters(), lr=1e-2)
    _train(it, optimizer, set_to_none=True, steps=2)
    average.update_parameters(it.module)
    return it.observed(average=[p.detach().clone() for p in average.parameters()])


def state_dict_assigned(it: Trainee) -> Observed:
    state = {
        name: 0.5 * t if t.is_floating_point() else t for name, t in it.module.state_dict().items()
    }
    it.module.load_state_dict(state, assign=True)
    it.step()
    return it.observed()


def functional_call(it: Trainee) -> Observed:
    parameters = {
        name: (2 * p.detach()).requires_grad_(p.requires_grad)
        for name, p in it.module.named_parameters()
    }
    found = torch.func.functional_call(it.module, parameters, it.batch(0), it.kwargs)
    leaves = torch.utils._pytree.tree_leaves(found)
    sum(leaf.float().mean() for leaf in leaves if leaf is not None).backward()
    return it.observed(gradients=[p.grad for p in parameters.values()])


def inside_a_checkpoint(it: Trainee) -> Observed:
    found = checkpoint(it.module, *it.batch(0), use_reentrant=False, **it.kwargs)
    leaves = torch.utils._pytree.tree_leaves(found)
    sum(leaf.float().mean() for leaf in leaves if leaf is not None).backward()
    return it.observed()


def under_a_dispatch_mode(it: Trainee) -> Observed:
    with FlopCounterMode(display=False) as counter:
        it.step()
    return it.observed(counts=counter.get_total_flops() > 0)


class Fails(TorchDispatchMode):
    """Raises at one op."""

    def __init__(self, kind: type[BaseException], left: int) -> None:
        super().__init__()
        self.kind, self.left = kind, left

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.kind
        return func(*args, **(kwargs or {}))


def _after_a_failure(it: Trainee, kind: type[BaseException]) -> Observed:
    buffers = {name: b.clone() for name, b in it.module.named_buffers()}
    for left in (3, 20):
        try:
            with Fails(kind, left):
                it.step()
        except kind:
            pass
        else:
            raise AssertionError("nothing failed")
        for name, buffer in it.module.named_buffers():
            buffer.copy_(buffers[name])
        it.module.zero_grad()
    torch.manual_seed(5)
    it.step()
    return it.observed()


def after_an_exception(it: Trainee) -> Observed:
    return _after_a_failure(it, MemoryError)


def after_ctrl_c(it: Trainee) -> Observed:
    return _after_a_failure(it, KeyboardInterrupt)


BEHAVIOURS: dict[str, Callable[[Trainee], Observed]] = {
    behaviour.__name__: behaviour
    for behaviour in (
        one_step,
        gradient_accumulation,
        interleaved_forwards_and_backwards,
        one_backward_of_two_forwards,
        retain_graph,
        gradients_of_some_parameters,
        backward_from_one_output,
        parameter_hooks,
        optimizer_in_backward,
        hooks_on_the_whole_module,
        adamw_with_clipping,
        sgd_with_zeroed_gradients,
        gradient_scaler,
        anomaly_mode,
        saved_tensors_hooks,
        eval_and_no_grad_between_steps,
        deep_copy_in_training,
        shallow_copy,
        pickled_in_training,
        pickled_in_eval_mode,
        two_instances,
        averaged_model,
        state_dict_assigned,
        functional_call,
        inside_a_checkpoint,
        under_a_dispatch_mode,
        after_an_exception,
        after_ctrl_c,
    )
}
