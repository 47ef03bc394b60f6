"""The books that a replay keeps, on events written by hand; and the code that it reads."""

from __future__ import annotations

import torch
from torch import fx

from remat.rewriter.inductor.lowering import Event, Lowered
from remat.rewriter.inductor.replay import LiveStorages


def carried_out(*events: Event, held: set[str] | None = None) -> LiveStorages:
    run = LiveStorages(lambda calls: [7] * len(calls), held or set())
    run.carry_out(Lowered(events, (), (), ()))
    return run


def call() -> fx.Node:
    return fx.Graph().call_function(torch.ops.aten.relu.default)


def test_a_freed_buffer_is_gone_and_the_peak_stays() -> None:
    run = carried_out(
        Event("allocate", "a", sizes_bytes=(100,)),
        Event("allocate", "b", sizes_bytes=(10,)),
        Event("free", "a"),
    )
    assert (run.live_bytes, run.peak_bytes) == (10, 110)


def test_a_renamed_buffer_takes_nothing_and_an_alias_keeps_its_storage() -> None:
    run = carried_out(
        Event("allocate", "a", sizes_bytes=(100,)),
        Event("rename", "b", of="a"),
        Event("alias", "c", of="b"),
        Event("free", "b"),
    )
    assert (run.live_bytes, run.peak_bytes) == (100, 100)


def test_elements_of_a_tuple_live_on_without_it() -> None:
    run = carried_out(
        Event("call", "t", sizes_bytes=(100, 30, 5)),
        Event("alias", "x", of="t", element=1),
        Event("free", "t"),
    )
    assert (run.live_bytes, run.peak_bytes) == (30, 135)


def test_a_call_takes_its_workspace_while_it_runs() -> None:
    run = carried_out(Event("call", "a", sizes_bytes=(100,), node=call()))
    assert (run.live_bytes, run.peak_bytes) == (100, 107)


def test_what_the_caller_holds_is_not_freed() -> None:
    run = carried_out(
        Event("allocate", "primals_1", sizes_bytes=(100,)),
        Event("free", "primals_1"),
        held={"primals_1"},
    )
    assert run.live_bytes == 100
