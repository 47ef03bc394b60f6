"""Pictures of a step as the judge of pipelines replays it: who runs when, and who holds bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from remat.formats import bytes_text, percent_text
from remat.schedules.pipeline.cluster_plan import ClusterFile
from remat.schedules.pipeline.holders import (
    ACTIVATIONS,
    BORDERS,
    GRADIENTS,
    PARAMETERS,
    RUNNING,
    STANDING,
    STATES,
)
from remat.schedules.pipeline.mesh_picture import shown
from remat.schedules.pipeline.replay import ActionSpan, PipelineReplay, RankReplay
from remat.schedules.pipeline.svg import Picture
from remat.schedules.views.palette import (
    BLUE,
    DARK_GREY,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    ROLES,
    VERMILLION,
    YELLOW,
)  # fmt: skip

WIDTH, LEFT, LANE, HIGH = 900, 90, 20, 150
MOST_LANES, MOST_STAGES = 16, 4
"""Ranks of the timeline, and stages whose bytes are drawn; of more, the first ones and the last."""
ACTIONS = {"F": ROLES["forward"], "B": ROLES["backward"], "I": ROLES["backward"], "W": GREEN}
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "of weights"}
COLOURS = {
    STATES: GREY, PARAMETERS: PURPLE, GRADIENTS: GREEN, BORDERS: YELLOW, ACTIVATIONS: BLUE,
    RUNNING: ORANGE,
}  # fmt: skip
"""What is saved and what waits for gradients of weights have one."""
SHORT = {STATES: "OS", ACTIVATIONS: "saved", RUNNING: "running"}
BEHIND = DARK_GREY


def timeline_picture(plan: ClusterFile, replay: PipelineReplay) -> Picture:
    """One lane a rank; what is empty is a bubble. Behind, gathers, reductions and updates."""
    lanes = shown(len(replay.ranks), MOST_LANES)
    step_us = plan.predicted.step_us
    says = f"{percent_text(replay.bubble)} of the ranks' time in the pipeline is spent waiting"
    picture = Picture(WIDTH + LEFT + 20, len(lanes) * LANE + 66, says)
    kinds: set[str] = set()
    for row, rank in enumerate(lanes):
        y = 6 + row * LANE
        picture.text(LEFT - 10, y + 13, f"rank {rank}", "end")
        picture.frame(LEFT, y, WIDTH, LANE - 4)
        for kind, boxes in _touching(replay.ranks[rank].spans, step_us).items():
            kinds.add(kind)
            picture.boxes([(x, y, w, LANE - 4) for x, w in boxes], ACTIONS[kind])
        end = _across(replay.time_us, step_us)
        picture.boxes([(end, y, LEFT + WIDTH - end, LANE - 4)], BEHIND, "states: reduce, update")
    foot = 6 + len(lanes) * LANE + 18
    shown_kinds = [(NAMES[k], ACTIONS[k]) for k in ACTIONS if k in kinds]
    picture.legend(LEFT, foot, [*shown_kinds, ("states behind", BEHIND)])
    picture.text(LEFT + WIDTH, foot, f"{step_us / 1e6:.2f} s", "end")
    picture.text(LEFT, foot + 24, says)
    return picture


def _touching(spans: Sequence[ActionSpan], step_us: float) -> dict[str, list[tuple[int, int]]]:
    """Actions of one kind as boxes of whole units: x and width. Those that touch become one."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    last = ""
    for span in spans:
        kind = span.action.kind
        begin, end = _across(span.begin_us, step_us), _across(span.end_us, step_us)
        boxes = found[kind]
        if boxes and last == kind and sum(boxes[-1]) >= begin:
            boxes[-1] = boxes[-1][0], end - boxes[-1][0]
        elif end > begin:
            boxes.append((begin, end - begin))
            last = kind
    return found


def _across(time_us: float, step_us: float) -> int:
    return LEFT + min(WIDTH, round(WIDTH * time_us / step_us))


def bytes_picture(
    plan: ClusterFile, replay: PipelineReplay, most_stages: int = MOST_STAGES
) -> Picture:
    """Bytes by holder over the step, of a few stages, below the budget."""
    stages = shown(len(plan.stages), most_stages)
    fullest = max(stage.peak_bytes for stage in plan.stages)
    says = f"the fullest stage holds {bytes_text(fullest)} of {bytes_text(plan.budget_bytes)}"
    picture = Picture(WIDTH + LEFT + 20, len(stages) * (HIGH + 24) + 40, says)
    for row, stage in enumerate(stages):
        _draw_stage(picture, plan, replay.ranks[stage], stage, 8 + row * (HIGH + 24))
    colours = [(SHORT.get(name, name), colour) for name, colour in COLOURS.items()]
    picture.legend(
        LEFT, picture.height - 12, [*colours, ("budget", VERMILLION)], WIDTH // (len(COLOURS) + 1)
    )
    return picture


def _draw_stage(
    picture: Picture, plan: ClusterFile, rank: RankReplay, stage: int, top: int
) -> None:
    scale = HIGH / (1.05 * plan.budget_bytes)
    base = top + HIGH

    def y(size_bytes: float) -> int:
        return base - round(scale * size_bytes)

    held = plan.stages[stage].held_bytes
    standing = sum(held.get(name, 0) for name in STANDING)
    saved, running = _stairs(rank, plan.predicted.step_us)
    picture.area(((x, y(standing + size)) for x, size in running), base, COLOURS[RUNNING])
    picture.area(((x, y(standing + size)) for x, size in saved), base, COLOURS[ACTIVATIONS])
    for name in reversed(STANDING):
        top_of = sum(held.get(one, 0) for one in STANDING[: STANDING.index(name) + 1])
        picture.boxes([(LEFT, y(top_of), WIDTH, base - y(top_of))], COLOURS[name])
    picture.line(LEFT, y(plan.budget_bytes), LEFT + WIDTH, VERMILLION)
    picture.text(LEFT - 10, top + 26, f"stage {stage}", "end")
    peak = plan.stages[stage].peak_bytes
    picture.text(LEFT - 10, top + 44, bytes_text(peak), "end")


Stairs = list[tuple[int, int]]


def _stairs(rank: RankReplay, step_us: float) -> tuple[Stairs, Stairs]:
    """Saved bytes, and those with what runs, as ends of steps and sizes; the most at each x."""
    saved: dict[int, int] = {LEFT: 0}
    running: dict[int, int] = {LEFT: 0}
    before = 0
    for span in rank.spans:
        begin, end = _across(span.begin_us, step_us), _across(span.end_us, step_us)
        for stairs, size in ((saved, before), (running, before)):
            stairs[begin] = max(stairs.get(begin, 0), size)
        saved[end] = max(saved.get(end, 0), span.saved_bytes)
        running[end] = max(running.get(end, 0), span.saved_bytes + span.need_bytes)
        before = span.after_bytes
    saved[LEFT + WIDTH] = running[LEFT + WIDTH] = before
    return _rising(saved), _rising(running)


def _rising(stairs: dict[int, int]) -> Stairs:
    """For each x the size of the step that ends there, from left to right."""
    return [(x, stairs[x]) for x in sorted(stairs)]
