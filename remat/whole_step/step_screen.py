"""What `remat run --microbatches` prints: a plan of a whole step beside named systems."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from remat.formats import bytes_text, gap_text, plain_table, rows_table, time_text
from remat.solved import budget_said
from remat.whole_step.planned_step import PlannedStep, Short
from remat.whole_step.step_config import NAMED_SYSTEMS, StepConfig
from remat.whole_step.step_planning import StepPlan

_LINKS = {"d2h": "to the host", "h2d": "to the device", "write": "to NVMe", "read": "from NVMe"}


def step_screen(plan: StepPlan) -> RenderableType:
    request, microbatch, links = plan.request, plan.task.microbatch, plan.task.links
    tokens = f" of {microbatch.n_tokens:,} tokens" if microbatch.n_tokens else ""
    nvme = f", NVMe {bytes_text(links.nvme_bytes)}" if links.write else ""
    head = (
        f", a step of {_count(request.microbatches, 'microbatch', 'microbatches')}{tokens}, "
        f"{request.optimizer}\nbudget "
        f"{budget_said(plan.task.budget_bytes, plan.graph.device)}, host "
        f"{bytes_text(links.host_bytes)}{nvme}\n"
    )
    title = Text.assemble((microbatch.name, "bold"), head)
    return Group(title, _systems_table(plan), Text(), rows_table(_choices(plan)))


def _systems_table(plan: StepPlan) -> Table:
    table = plain_table("by the simulator", "step", "tokens/s", "device", "host", "NVMe")
    named = {NAMED_SYSTEMS[name].title: found for name, found in plan.found.systems.items()}
    for title, planned in {"this plan": plan.best, **named}.items():
        if not isinstance(planned, PlannedStep):
            table.add_row(title, "no plan", *["-"] * 4)
            continue
        found = planned.simulation
        tokens = plan.tokens_per_s(found)
        table.add_row(
            title, _long_time_text(found.time_us), f"{tokens:,.0f}" if tokens else "-",
            *(bytes_text(one) if one else "-"
              for one in (found.peak_bytes, found.host_peak_bytes, found.nvme_peak_bytes)),
        )  # fmt: skip
    return table


def _choices(plan: StepPlan) -> Iterator[tuple[str, str]]:
    config, simulation, found = plan.best.config, plan.simulation, plan.found
    bound = _long_time_text(found.lower_bound_us)
    yield "lower bound", f"{bound} in any order; {gap_text(found.gap)}"
    yield (
        "order",
        ", then ".join(  # ``6 passes of 1 microbatch, then 1 pass of 2 microbatches``
            f"{_count(len(list(same)), 'pass', 'passes')} of "
            f"{_count(size, 'microbatch', 'microbatches')}"
            for size, same in groupby(one.microbatches for one in config.passes)
        ),
    )
    if plan.chunks:
        yield "chunks", ", ".join(f"{one.region} in {one.chunks}" for one in plan.chunks)
    yield from (("saved", words) for words in _saved_texts(plan, config))
    yield "state", _state_text(plan, config)
    yield "gradients", _gradients_text(config)
    moved_bytes = simulation.moved_bytes.items()
    copies = [f"{bytes_text(n)} {_LINKS[link]}" for link, n in moved_bytes if n]
    yield "copies", ", ".join(copies) or "none"
    busy_us, host_us = simulation.busy_us["device"], simulation.busy_us["host"]
    busy, waits, on_host = map(_long_time_text, (busy_us, simulation.time_us - busy_us, host_us))
    does = "computes and communicates" if plan.task.microbatch.ranks else "computes"
    yield "device", f"{does} {busy} and waits {waits}; the host computes {on_host}"
    for name, one in found.systems.items():
        if not isinstance(one, PlannedStep):
            why = _too_small_text(one) if isinstance(one, Short) else one
            yield "no plan", f"of {NAMED_SYSTEMS[name].title}: {why}"
    if (ranks := plan.task.microbatch.ranks) is not None:
        how = "whole from forward to backward" if ranks.keeps_whole else "whole for each layer"
        yield (
            "ranks",
            f"{ranks.count}, parameters {how}; {ranks.here} of a machine share its host, its NVMe "
            f"and {ranks.here * plan.task.update.host_gb_s:g} GB/s of its memory evenly; "
            f"collectives {ranks.links}, and nothing is computed beside them",
        )
    links, rate = plan.task.links.source or "as given", plan.task.update.host_gb_s
    modelled = f"modelled for {plan.graph.device}; links {links}; updates at {rate:g} GB/s"
    yield "costs", f"{modelled} of host memory"
    yield "status", f"{found.judged} plans judged; planned, not run"


def _too_small_text(short: Short) -> str:
    return f"the {short.tier} needs {bytes_text(short.need_bytes)}"


def _saved_texts(plan: StepPlan, config: StepConfig) -> list[str]:
    found = list[str]()
    # Equal passes share a line.
    for one, same in groupby(config.passes):
        layers = plan.task.microbatch.layers
        picked = [layer.options[i] for layer, i in zip(layers, one.options, strict=True)]
        saved_bytes = sum(option.saved_bytes for option in picked)
        again_us = sum(option.extra_us for option in picked)
        hosted = f", that of {one.hosted} layers on the host meanwhile" if one.hosted else ""
        found.append(
            f"{bytes_text(saved_bytes)} a microbatch{hosted}, {again_us / 1e3:.0f} ms "
            f"computed again ({_count(len(list(same)), 'pass', 'passes')})"
        )
    return found


def _state_text(plan: StepPlan, config: StepConfig) -> str:
    tiers = [
        f"{count} of {len(config.state)} groups on {label}"
        for tier, label in (("device", "the device"), ("host", "the host"), ("nvme", "NVMe"))
        if (count := config.state.count(tier))
    ]
    slots = f", {_count(config.slots, 'slot', 'slots')}" if "nvme" in config.state else ""
    here = len(config.updated_on_device(plan.task.microbatch))
    late = f"; {here} updated on the device" if here else ""
    return f"{plan.request.state} state: {', '.join(tiers)}{slots}{late}"


def _gradients_text(config: StepConfig) -> str:
    # A single pass adds up its own microbatches, and states on the device never leave.
    if len(config.passes) == 1 or set(config.state) == {"device"}:
        return "added on the device"
    kept = f", {len(config.kept_gradients)} groups stay there" if config.kept_gradients else ""
    return "added on the host" if config.sums == "host" else f"added on the device{kept}"


def _long_time_text(time_us: float) -> str:
    """``18.65 s``, and below a second as any step."""
    return f"{time_us / 1e6:.2f} s" if time_us >= 1e6 else time_text(time_us)


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def step_json(plan: StepPlan) -> dict[str, Any]:
    found, best = plan.found, plan.found.plan
    return {
        "model": plan.task.microbatch.name,
        "device": plan.request.device,
        "microbatches": plan.request.microbatches,
        "optimizer": plan.request.optimizer,
        "state": plan.request.state,
        "budget_bytes": plan.task.budget_bytes,
        "links": msgspec.to_builtins(plan.task.links),
        "plan": _planned_json(plan, best) if best else None,
        "shortage": plan.shortage,
        "systems": {
            name: {"source": NAMED_SYSTEMS[name].source} | _planned_json(plan, one)
            for name, one in found.systems.items()
        },
        "bound": {"lower_bound_us": found.lower_bound_us, "gap": found.gap},
        "judged": found.judged,
    }


def _planned_json(plan: StepPlan, one: PlannedStep | Short | str) -> dict[str, Any]:
    if not isinstance(one, PlannedStep):
        return {"no_plan": msgspec.to_builtins(one)}
    simulation = one.simulation
    return {
        "time_us": simulation.time_us,
        "tokens_per_s": plan.tokens_per_s(simulation),
        "device_peak_bytes": simulation.peak_bytes,
        "host_peak_bytes": simulation.host_peak_bytes,
        "nvme_peak_bytes": simulation.nvme_peak_bytes,
        "busy_us": simulation.busy_us,
        "moved_bytes": simulation.moved_bytes,
        "setting": msgspec.to_builtins(one.config),  # what a config is called in JSON
    }
