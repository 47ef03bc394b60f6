"""A job in words: the published mesh beside ours, the free choice, and why it is chosen."""

from __future__ import annotations

from typing import Any

from remat.formats import percent_text

WIDE = 128
"""The most ranks of FSDP that were compared with published figures: torchtitan's Llama 8B."""


def published_lines(name: str, facts: dict[str, Any]) -> list[str]:
    """The job on its published mesh."""
    head = f"{name} on {facts['gpus']} x {facts['device']}"
    ours = facts["on_its_mesh"]
    if ours is None:
        return [f"{head}: its mesh does not fit"]
    published = [f"MFU {percent_text(facts['published_mfu'])}"] if facts["published_mfu"] else []
    if facts["published_s"]:
        published.append(f"{facts['published_s']:.2f} s, ours {off_text(facts, ours['step_s'])}")
    lines = [
        f"{head}: {ours['mesh']}: {_figures(ours)}; published {', '.join(published) or 'none'} "
        f"({facts['source']})",
        f"    takes {_takes(ours)}",
    ]
    if "by_its_rule_s" in facts:
        rule = facts["by_its_rule_s"]
        lines.append(
            f"    with its own recomputation, {facts['its_rule']}: {rule:.2f} s, "
            f"{off_text(facts, rule)}"
        )
    return lines


def free_lines(facts: dict[str, Any]) -> list[str]:
    """What is chosen freely, and why."""
    free = facts["free"]
    if free is None:
        return ["    free: no mesh fits"]
    holders = ", ".join(f"{k} {v:.1f}" for k, v in free["fullest_gib"].items())
    lines = [
        f"    free: {free['mesh']}, {_states(free)}: "
        f"{_figures(free)}; without overlap {free['without_overlap_s']:.2f} "
        f"s; {free['evaluated']} evaluated, {free['pruned']} pruned, "
        f"{facts['free_made']['cpu_s']:.0f} CPU s",
        f"    takes {_takes(free)}",
        f"    GiB of the fullest stage: {holders}; of {free['budget_gib']:.0f}",
        *_why(facts["on_its_mesh"], free),
    ]
    for one in free["runners_up"]:
        more = percent_text(one["step_s"] / free["step_s"] - 1)
        lines.append(f"    runner-up +{more}: {one['mesh']}, {_states(one)}")
    return lines


def _why(ours: dict[str, Any] | None, free: dict[str, Any]) -> list[str]:
    """Beside the published mesh: what each kind of time changes by."""
    if ours is None:
        return ["    why: the published mesh does not fit"]
    if ours["mesh"] == free["mesh"]:
        return ["    why: it is the published mesh"]
    change = {k: free["takes_s"][k] - ours["takes_s"][k] for k in free["takes_s"]}
    said = ", ".join(f"{k} {v:+.2f} s" for k, v in change.items() if abs(v) >= 0.005)
    lines = [f"    why: the published mesh takes {ours['step_s']:.2f} s; beside it {said}"]
    if free["states_over"] > WIDE:
        lines.append(
            f"    doubt: states over {free['states_over']} ranks; the model was compared with "
            f"published steps up to {WIDE}, and knows no stragglers and no congestion"
        )
    return lines


def off_text(facts: dict[str, Any], step_s: float) -> str:
    """Ours over the published time."""
    return f"{100 * (step_s / facts['published_s'] - 1):+.1f} %"


def _states(one: dict[str, Any]) -> str:
    return f"P kept {one['parameters_kept']}, OS over {one['states_over']}"


def _figures(one: dict[str, Any]) -> str:
    first, last = one["again"]
    return (
        f"{one['step_s']:.2f} s modelled, MFU {percent_text(one['mfu'])}, waits "
        f"{percent_text(one['waits'])}, again {percent_text(first)} first .. "
        f"{percent_text(last)} last stage"
    )


def _takes(one: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.2f} s" for name, value in one["takes_s"].items())
