"""Steps in an arena: eager's bits, every request in its place, whatever the user keeps."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import resource
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import remat
from remat.analysis.plan_figures import use_arena
from remat.graph_capture.errors import ArenaError
from remat.graph_capture.torch_private.core import OpWatcher
from remat.rewriter.arena.arena import Arena
from remat.rewriter.arena.library import Counts, arena_library, built_library
from remat.rewriter.checking.check import check
from tests.models import MODELS, make
from tests.rewriter.arena.steps_in_arena import (
    in_arena,
    loss_of,
    module_of,
    needs_compiler,
    same,
    trained,
)

pytestmark = needs_compiler
QUICK = ("dropout", "batch_norm_in_place_relu", "in_place_views")
NAMES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MODELS]


def hits(arena: Arena) -> int:
    assert arena.counts.misses == 0, arena
    return arena.counts.hits


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_eager_and_all_in_the_arena(name: str) -> None:
    module, arena = in_arena(name)
    _, args, kwargs, loss_fn, target = make(name)
    kept = module_of(name)
    found = check(
        module.original_module, module, args, kwargs, loss_fn=loss_fn, target=target, steps=1
    )
    beside = check(
        kept.original_module, kept, args, kwargs, loss_fn=loss_fn, target=target, steps=1
    )
    assert found.equal, found.differences
    # The profiler is told of what lies in the arena.
    assert found.plan_peak_bytes == beside.plan_peak_bytes
    # One step is compared and metered, one is timed.
    assert hits(arena) == 2 * len(arena.layout.offsets_bytes)


@pytest.mark.parametrize("name", ["tied_weights", "loss_function_with_target"])
def test_trains_as_without_it_and_misses_nothing(name: str) -> None:
    module, arena = in_arena(name)
    assert same(trained(name, module), trained(name, module_of(name)))
    assert hits(arena) == 4 * len(arena.layout.offsets_bytes)


class _Addresses(OpWatcher):
    """Of the storages of all results, in the order of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = func(*args, **kwargs)
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, Tensor):
                self.seen.append((str(func), one.untyped_storage().data_ptr()))
        return made


@pytest.mark.parametrize("name", ["plain", "dropout"])
def test_all_but_the_loss_and_its_gradient_keep_their_addresses(name: str) -> None:
    module, _ = in_arena(name)
    args, kept = make(name)[1], list[Any]()
    steps: list[list[tuple[str, int]]] = []
    for i in range(4):
        module.zero_grad()
        with _Addresses() as noted:
            loss = module(*args)
            loss.backward()
        steps.append(noted.seen)
        # Torch's allocator gives other places next: those of scalars that were freed are taken.
        kept.append((loss, torch.empty(1000 * i), [torch.empty(()) for _ in range(64)]))
    for first, second in itertools.pairwise(steps):
        moved = {a[0] for a, b in zip(first, second, strict=True) if a != b}
        # The user's result, and what autograd begins backward with: neither is the module's.
        assert moved == {"aten.mean.default", "aten.ones_like.default", "aten.expand.default"}
        assert len(first) > 50


def test_other_systems_than_linux_are_refused_before_a_step_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ArenaError, match="train without an arena, which only works on Linux"):
        built_library()


def test_nothing_of_the_users_is_changed_by_recording() -> None:
    module, other = module_of("dropout"), module_of("dropout")
    parameter = next(module.parameters())
    parameter.grad = gradient = torch.ones_like(parameter)
    called: list[Any] = []
    parameter.register_post_accumulate_grad_hook(called.append)
    state = torch.get_rng_state()
    use_arena(module, make("dropout")[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert parameter.grad is gradient
    assert torch.equal(gradient, torch.ones_like(parameter))
    assert called == []
    assert same(list(module.state_dict().values()), list(other.state_dict().values()))


def test_the_steady_state_has_no_page_faults() -> None:
    module, arena = in_arena("plain")
    faults: list[int] = []
    for _ in range(6):
        module.zero_grad()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        loss_of("plain", module).backward()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert hits(arena) == 6 * len(arena.layout.offsets_bytes)
    # Python itself may ask for a page; the arena has more than that.
    assert min(faults[1:]) < arena.arena_bytes / 4096 / 10


def test_results_that_the_user_keeps_are_not_in_the_way() -> None:
    module, args = module_of("logits_without_loss"), make("logits_without_loss")[1]
    arena = use_arena(module, args, loss_fn=torch.sum)
    kept = [module(*args)]
    expected = kept[0].detach().clone()
    for _ in range(3):
        kept[-1].sum().backward()
        module.zero_grad()
        kept.append(module(*args))
    assert all(torch.equal(result, expected) for result in kept)
    assert hits(arena) >= 3 * len(arena.layout.offsets_bytes)


def test_a_loss_of_another_layout_costs_misses_and_no_bits() -> None:
    module, args = module_of("logits_without_loss"), make("logits_without_loss")[1]
    other = module_of("logits_without_loss")
    arena = use_arena(module, args)
    with pytest.warns(UserWarning, match="were not planned"):
        module(*args).sum().backward()
    other(*args).sum().backward()
    gradients = [[p.grad for p in each.parameters()] for each in (module, other)]
    assert same(*gradients)
    assert arena.counts.unplanned > 0


def test_gradients_that_live_into_the_next_step_move_out() -> None:
    """As where `zero_grad` comes after forward, or micro-batches are added up."""
    module, arena = in_arena("plain")
    other = module_of("plain")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for micro in range(8):
            for each in (module, other):
                loss = loss_of("plain", each)
                if micro % 3 == 0:
                    each.zero_grad()
                loss.backward()
            pairs = zip(module.parameters(), other.parameters(), strict=True)
            assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None)
            if micro == 4:
                healed = arena.counts.misses
    assert arena.counts.moved_out > 0
    assert arena.counts.misses == healed


def test_a_step_begun_in_another_misses_and_says_so_once() -> None:
    module, arena = in_arena("plain")
    other = module_of("plain")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            losses = [loss_of("plain", module) for _ in range(2)]
            expected = [loss_of("plain", other) for _ in range(2)]
            assert same(losses, expected)
            for one, two in zip(losses, expected, strict=True):
                module.zero_grad()
                one.backward()
                other.zero_grad()
                two.backward()
    (said,) = [str(one.message) for one in told if one.category is UserWarning]
    assert "went to torch's allocator" in said
    assert arena.counts.occupied > 0
    gradients = [[p.grad for p in each.parameters()] for each in (module, other)]
    assert same(*gradients)


def test_other_threads_are_not_in_its_way() -> None:
    module, arena = in_arena("attention")
    ended = threading.Event()

    def allocate() -> None:
        while not ended.is_set():
            torch.empty(1000)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        trained("attention", module, 3)
    finally:
        ended.set()
        thread.join()
    assert hits(arena) == 3 * len(arena.layout.offsets_bytes)


def test_a_step_in_another_thread_is_served_too() -> None:
    module, arena = in_arena("plain")
    thread = threading.Thread(target=trained, args=("plain", module, 2))
    thread.start()
    thread.join()
    assert hits(arena) == 2 * len(arena.layout.offsets_bytes)


def test_several_plans_have_an_arena_each() -> None:
    (one, first), (two, second) = in_arena("plain"), in_arena("dropout")
    for _ in range(2):
        losses = loss_of("plain", one), loss_of("dropout", two)
        for loss in losses:
            loss.backward()
        one.zero_grad()
        two.zero_grad()
    assert hits(first) == 2 * len(first.layout.offsets_bytes)
    assert hits(second) == 2 * len(second.layout.offsets_bytes)


def test_two_threads_train_in_an_arena_each() -> None:
    (one, first), (two, second), other = in_arena("plain"), in_arena("plain"), module_of("plain")
    (batch,) = make("plain")[1]

    def train(module: torch.nn.Module) -> None:
        for i in range(5):
            module.zero_grad()
            module(batch * (i + 1)).backward()

    threads = [threading.Thread(target=train, args=(module,)) for module in (one, two, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gradients = [[p.grad for p in module.parameters()] for module in (one, two, other)]
    assert same(gradients[0], gradients[2])
    assert same(gradients[1], gradients[2])
    assert hits(first) == hits(second) == 5 * len(first.layout.offsets_bytes)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_graph_that_fails_leaves_no_thread_armed(error: type[BaseException]) -> None:
    module, arena = in_arena("plain")

    def failing(args: list[Any]) -> Any:
        torch.empty(1000)
        raise error

    for phase in ("forward", "backward"):
        with pytest.raises(error):
            arena.run(phase, failing, [])
        assert not arena_library().is_armed()
    before = arena.counts.hits
    trained("plain", module, 1)
    assert arena.counts.hits - before == len(arena.layout.offsets_bytes)


def test_eval_mode_and_the_original_are_not_served() -> None:
    module, arena = in_arena("plain")
    original = module.original_module
    with torch.no_grad():
        loss_of("plain", module)
    loss_of("plain", original).backward()
    module.eval()
    loss_of("plain", module).backward()
    assert arena.counts == Counts()


def test_copies_share_it_and_pickles_have_none() -> None:
    module, arena = in_arena("plain")
    trained("plain", copy.deepcopy(module), 1)
    assert hits(arena) == len(arena.layout.offsets_bytes)
    trained("plain", pickle.loads(pickle.dumps(module)), 1)
    assert hits(arena) == len(arena.layout.offsets_bytes)


def test_gradients_outlive_a_closed_arena_and_its_memory_goes_with_them() -> None:
    gc.collect()
    mapped = arena_library()._c.remat_arenas_mapped()
    module, arena = in_arena("plain")
    loss_of("plain", module).backward()
    kept = [p.grad for p in module.parameters()]
    expected = [gradient.clone() for gradient in kept if gradient is not None]
    counts = arena.counts
    arena.close()
    arena.close()
    assert not arena.is_open
    assert arena.counts == counts
    loss_of("plain", module).backward()
    assert arena.counts == counts
    assert same([g / 2 for g in kept], expected)
    assert arena_library()._c.remat_arenas_mapped() == mapped + 1
    del kept
    module.zero_grad()
    assert arena_library()._c.remat_arenas_mapped() == mapped


def test_an_arena_goes_with_its_module() -> None:
    gc.collect()
    mapped = arena_library()._c.remat_arenas_mapped()
    module, arena = in_arena("plain")
    assert arena_library()._c.remat_arenas_mapped() == mapped + 1
    del module, arena
    gc.collect()
    assert arena_library()._c.remat_arenas_mapped() == mapped


def test_with_closes_it() -> None:
    with in_arena("plain")[1] as arena:
        assert arena.is_open
        assert "open" in repr(arena)
    assert "closed" in repr(arena)


@pytest.mark.slow
def test_inductors_code_in_an_arena() -> None:
    model, args, *_ = make("plain")
    module = remat.rematerialize(model, args, budget="90%", compile=True)
    arena = use_arena(module, args)
    other = copy.deepcopy(model)
    expected = loss_of("plain", other)
    for _ in range(2):
        module.zero_grad()
        loss = loss_of("plain", module)
        loss.backward()
        torch.testing.assert_close(loss, expected)
    assert hits(arena) == 2 * len(arena.layout.offsets_bytes)
