"""One page of a plan for a cluster: its mesh, its step, its bytes. It needs no script."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from remat.cluster.pipeline_replay import (
    RUNNING,
    SAVED_ACTIVATIONS,
    STANDING,
    STATES,
    ActionSpan,
    PipelineReplay,
    RankReplay,
    holders_in,
)
from remat.cluster.plan_file import ClusterFile, Parallelism
from remat.formats import bytes_text, percent_text
from remat.schedules import palette
from remat.schedules.report.page import Table, file_text, rendered_html


class _Picture:
    """SVG elements in the order in which they are drawn, on a plane of whole units."""

    def __init__(self, width: int, height: int, says: str) -> None:
        self.width, self.height, self.says = width, height, says
        self.elements: list[str] = []

    def boxes(
        self, rects: Iterable[tuple[int, int, int, int]], colour: str, title: str = ""
    ) -> None:
        """Of one colour: x, y, width, height of each."""
        path = "".join(f"M{x} {y}h{w}v{h}h{-w}z" for x, y, w, h in rects)
        if path:
            self._add("path", f'fill="{colour}" d="{path}"', title)

    def area(self, points: Iterable[tuple[int, int]], base: int, colour: str) -> None:
        """What lies between steps, each of which ends at its x, and the line at `base`."""
        steps = list(points)
        path = f"M{steps[0][0]} {base}" + "".join(f"V{y}H{x}" for x, y in steps)
        self._add("path", f'fill="{colour}" d="{path}V{base}z"')

    def frame(self, x: int, y: int, width: int, height: int) -> None:
        at = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        self._add("rect", f'{at} fill="none" stroke="currentColor" stroke-opacity=".6"')

    def line(self, x: int, y: int, to_x: int, colour: str) -> None:
        dashes = 'stroke-width="2" stroke-dasharray="8 5" fill="none"'
        self._add("path", f'd="M{x} {y}H{to_x}" stroke="{colour}" {dashes}')

    def text(self, x: int, y: int, said: str, anchor: str = "start") -> None:
        at = f'x="{x}" y="{y}" text-anchor="{anchor}"'
        # Letters take the colour of the page, which may be light or dark.
        self.elements.append(f'<text {at} fill="currentColor">{escape(said)}</text>')

    def legend(self, x: int, y: int, colours: Iterable[tuple[str, str]], step: int = 150) -> None:
        for i, (name, colour) in enumerate(colours):
            self.boxes([(x + i * step, y - 11, 12, 12)], colour)
            self.text(x + i * step + 18, y, name)

    def inline(self) -> str:
        return self._whole(f'class="picture" style="max-width: {self.width}px"')

    def file(self, ink: str) -> str:
        space = "http://www.w3.org/2000/svg"
        return self._whole(f'xmlns="{space}" color="{ink}" font-family="sans-serif"')

    def _whole(self, attributes: str) -> str:
        body = "\n".join(self.elements)
        return (
            f'<svg {attributes} viewBox="0 0 {self.width} {self.height}" font-size="13" role="img" '
            f'aria-label="{escape(self.says)}">\n{body}\n</svg>\n'
        )

    def _add(self, name: str, attributes: str, title: str = "") -> None:
        end = f"><title>{escape(title)}</title></{name}>" if title else "/>"
        self.elements.append(f"<{name} {attributes}{end}")


# Ranks are numbered as torchtitan's meshes number them: stages first, then replicas, shards,
# context and tensor parallel ranks, so that the last lie side by side.


_CELL, _GAP, _MESH_LEFT, _TOP = 14, 12, 150, 46
_LEAST = 520  # width that the line below needs
_MOST_COLUMNS, _MOST_ROWS = 8, 6
"""Stages and data parallel ranks that are drawn; of more, the first ones and the last."""


def mesh_picture(plan: ClusterFile) -> _Picture:
    """Stages from left to right, data parallel ranks from top to bottom; a cell is a GPU."""
    mesh = plan.parallelism
    tp, cp = mesh.tensor_parallel_degree, mesh.context_parallel_degree
    stages = shown(mesh.pipeline_parallel_degree, _MOST_COLUMNS)
    rows = shown(mesh.data_parallel_ranks, _MOST_ROWS)
    wide, high = max(tp * _CELL, 64) + _GAP, cp * _CELL + _GAP
    width = max(_MESH_LEFT + len(stages) * wide + 20, _LEAST)
    says = (
        f"{plan.gpus} GPUs: {mesh.pipeline_parallel_degree} stages, {mesh.data_parallel_ranks} "
        f"data parallel ranks, each of {cp} context times {tp} tensor parallel GPUs"
    )
    picture = _Picture(width, _TOP + len(rows) * high + 40, says)
    for column, stage in enumerate(stages):
        blocks = len(plan.stages[stage].blocks)
        picture.text(_MESH_LEFT + column * wide, 16, f"stage {stage}")
        picture.text(_MESH_LEFT + column * wide, 34, f"{blocks} blocks")
        for row, replica in enumerate(rows):
            x, y = _MESH_LEFT + column * wide, _TOP + row * high
            first = rank_of(mesh, stage, replica)
            cells = [(x + t * _CELL, y + c * _CELL, _CELL - 2, _CELL - 2)
                     for c in range(cp) for t in range(tp)]  # fmt: skip
            last = first + tp * cp - 1
            node = f"node {first // plan.node_size}"
            title = f"stage {stage}, data parallel rank {replica}: GPUs {first} to {last}, {node}"
            picture.boxes(cells, palette.CYCLE[column % len(palette.CYCLE)], title)
    shard = mesh.data_parallel_shard_degree
    for row, replica in enumerate(rows):
        of_states = f"replica {replica // shard}, shard {replica % shard}"
        picture.text(_MESH_LEFT - 14, _TOP + row * high + _CELL - 3, of_states, "end")
    drawn = f"{len(stages)} of {len(plan.stages)} stages, {len(rows)} of {mesh.data_parallel_ranks}"
    picture.text(8, picture.height - 12, f"a cell is a GPU; drawn are {drawn} data parallel ranks")
    return picture


def rank_of(mesh: Parallelism, stage: int, replica: int) -> int:
    of_replica = mesh.tensor_parallel_degree * mesh.context_parallel_degree
    return (stage * mesh.data_parallel_ranks + replica) * of_replica


def shown(count: int, most: int) -> list[int]:
    """All of a few, else the first ones and the last."""
    return list(range(count)) if count <= most else [*range(most - 1), count - 1]


_WIDTH, _LEFT, _LANE, _HIGH = 900, 90, 20, 150
_MOST_LANES, _MOST_STAGES = 16, 4
"""Ranks of the timeline, and stages whose bytes are drawn; of more, the first ones and the last."""
_BACKWARD = palette.ROLES["backward"]
_ACTIONS = {"F": palette.ROLES["forward"], "B": _BACKWARD, "I": _BACKWARD, "W": palette.GREEN}
_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "of weights"}
_OF_STANDING = palette.GREY, palette.PURPLE, palette.GREEN, palette.YELLOW
_COLOURS = dict(zip(STANDING, _OF_STANDING, strict=True)) | {
    SAVED_ACTIVATIONS: palette.BLUE, RUNNING: palette.ORANGE
}  # fmt: skip
"""What is saved and what waits for gradients of weights have one."""
_SHORT = {STATES: "OS", SAVED_ACTIVATIONS: "saved", RUNNING: "running"}
_BEHIND = palette.DARK_GREY


def timeline_picture(plan: ClusterFile, replay: PipelineReplay) -> _Picture:
    """One lane a rank; what is empty is a bubble. Behind, gathers, reductions and updates."""
    lanes = shown(len(replay.ranks), _MOST_LANES)
    step_us = plan.predicted.step_us
    says = f"{percent_text(replay.bubble)} of the ranks' time in the pipeline is spent waiting"
    picture = _Picture(_WIDTH + _LEFT + 20, len(lanes) * _LANE + 66, says)
    kinds: set[str] = set()
    for row, rank in enumerate(lanes):
        y = 6 + row * _LANE
        picture.text(_LEFT - 10, y + 13, f"rank {rank}", "end")
        picture.frame(_LEFT, y, _WIDTH, _LANE - 4)
        for kind, boxes in _touching(replay.ranks[rank].spans, step_us).items():
            kinds.add(kind)
            picture.boxes([(x, y, w, _LANE - 4) for x, w in boxes], _ACTIONS[kind])
        end = _across(replay.time_us, step_us)
        behind = (end, y, _LEFT + _WIDTH - end, _LANE - 4)
        picture.boxes([behind], _BEHIND, "states: reduce, update")
    foot = 6 + len(lanes) * _LANE + 18
    shown_kinds = [(_NAMES[k], _ACTIONS[k]) for k in _ACTIONS if k in kinds]
    picture.legend(_LEFT, foot, [*shown_kinds, ("states behind", _BEHIND)])
    picture.text(_LEFT + _WIDTH, foot, seconds_text(step_us), "end")
    picture.text(_LEFT, foot + 24, says)
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
    return _LEFT + min(_WIDTH, round(_WIDTH * time_us / step_us))


def bytes_picture(plan: ClusterFile, replay: PipelineReplay, most: int = _MOST_STAGES) -> _Picture:
    stages = shown(len(plan.stages), most)
    fullest = max(stage.peak_bytes for stage in plan.stages)
    says = f"the fullest stage holds {bytes_text(fullest)} of {bytes_text(plan.budget_bytes)}"
    picture = _Picture(_WIDTH + _LEFT + 20, len(stages) * (_HIGH + 24) + 40, says)
    for row, stage in enumerate(stages):
        _draw_stage(picture, plan, replay.ranks[stage], stage, 8 + row * (_HIGH + 24))
    colours = [(_SHORT.get(name, name), colour) for name, colour in _COLOURS.items()]
    colours.append(("budget", palette.VERMILLION))
    picture.legend(_LEFT, picture.height - 12, colours, _WIDTH // len(colours))
    return picture


def _draw_stage(on: _Picture, plan: ClusterFile, rank: RankReplay, stage: int, top: int) -> None:
    scale = _HIGH / (1.05 * plan.budget_bytes)
    base = top + _HIGH

    def y(size_bytes: float) -> int:
        return base - round(scale * size_bytes)

    held = plan.stages[stage].held_bytes
    standing = sum(held.get(name, 0) for name in STANDING)
    saved, running = _stairs(rank, plan.predicted.step_us)
    # Each area reaches down to the base, so the highest is drawn first.
    on.area(((x, y(standing + size)) for x, size in running), base, _COLOURS[RUNNING])
    on.area(((x, y(standing + size)) for x, size in saved), base, _COLOURS[SAVED_ACTIVATIONS])
    for name in reversed(STANDING):
        top_of = sum(held.get(one, 0) for one in STANDING[: STANDING.index(name) + 1])
        on.boxes([(_LEFT, y(top_of), _WIDTH, base - y(top_of))], _COLOURS[name])
    on.line(_LEFT, y(plan.budget_bytes), _LEFT + _WIDTH, palette.VERMILLION)
    on.text(_LEFT - 10, top + 26, f"stage {stage}", "end")
    on.text(_LEFT - 10, top + 44, bytes_text(plan.stages[stage].peak_bytes), "end")


_Stairs = list[tuple[int, int]]


def _stairs(rank: RankReplay, step_us: float) -> tuple[_Stairs, _Stairs]:
    """Saved bytes, and those with what runs, as ends of steps and sizes; the most at each x."""
    saved, running, before = {_LEFT: 0}, {_LEFT: 0}, 0
    for span in rank.spans:
        begin, end = _across(span.begin_us, step_us), _across(span.end_us, step_us)
        for stairs in (saved, running):
            # Several actions may end within one unit of the picture.
            stairs[begin] = max(stairs.get(begin, 0), before)
        saved[end] = max(saved.get(end, 0), span.saved_bytes)
        running[end] = max(running.get(end, 0), span.saved_bytes + span.need_bytes)
        before = span.after_bytes
    saved[_LEFT + _WIDTH] = running[_LEFT + _WIDTH] = before
    return sorted(saved.items()), sorted(running.items())


# What the screen and the page say alike of a plan.


def mesh_text(mesh: Parallelism, virtual_stages: int) -> str:
    """``tp 8  pp 4 ...``, with the pipeline's schedule."""
    pp, replicas, shards, cp, tp = mesh.degrees
    text = f"tp {tp}  cp {cp}  pp {pp}  dp {replicas} x {shards}"
    if mesh.pipeline_parallel_schedule:
        text += f"  {mesh.pipeline_parallel_schedule}"
        text += f", {virtual_stages} virtual stages a rank" if virtual_stages > 1 else ""
    return text


def states_text(plan: ClusterFile) -> str:
    mesh = plan.parallelism
    ranks = mesh.data_parallel_shard_degree * mesh.context_parallel_degree
    keep = mesh.fsdp_reshard_after_forward
    kept = {"never": "whole", "always": "in shards"}.get(keep, f"over {keep} ranks (hpZ)")
    split = f"OS split over {ranks}" if ranks > 1 else "OS whole on each replica"
    reduced = "after each microbatch" if plan.gradients == "each" else "once, at the end"
    return f"{split}; P between forward and backward {kept}; G reduced {reduced}"


def parameters_text(plan: ClusterFile) -> str:
    return f"{plan.parameters / 1e9:.1f}B parameters"


def seconds_text(time_us: float) -> str:
    return f"{time_us / 1e6:.2f} s"


def stage_rows(plan: ClusterFile, text: Callable[[int], str]) -> Iterator[tuple[str, ...]]:
    """Of each stage, with bytes as `text` writes them: those of `holders_in`, and the peak."""
    holders = holders_in(stage.held_bytes for stage in plan.stages)
    for number, stage in enumerate(plan.stages):
        again = f"+{percent_text(stage.overhead)}" if stage.overhead > 0 else "none"
        held = (text(stage.held_bytes.get(name, 0)) for name in holders)
        flight = f"{stage.microbatches_in_flight:.3g}"
        yield str(number), str(len(stage.blocks)), flight, again, *held, text(stage.peak_bytes)


RUNNER_UP_HEADERS = "P kept", "step", "MFU"  # beside the mesh


def runner_up_rows(plan: ClusterFile) -> Iterator[tuple[str, ...]]:
    for one in plan.runners_up:
        mesh = one.parallelism
        size = mesh.pipeline_parallel_microbatch_size
        yield (
            f"{mesh_text(mesh, one.virtual_stages)}, microbatch {size}",
            mesh.fsdp_reshard_after_forward, seconds_text(one.step_us), percent_text(one.mfu),
        )  # fmt: skip


def cluster_page(plan: ClusterFile, replay: PipelineReplay) -> str:
    """As HTML."""
    drawn = (
        ("bytes", "Bytes of a GPU over the step", bytes_picture(plan, replay)),
        ("step", "The step of each rank", timeline_picture(plan, replay)),
        ("mesh", "Mesh", mesh_picture(plan)),
    )
    holders = holders_in(stage.held_bytes for stage in plan.stages)
    headers = ("stage", "blocks", "in flight", "recomputed", *holders, "peak")
    rows = tuple(stage_rows(plan, bytes_text)), tuple(runner_up_rows(plan))
    near = Table("near", "Meshes within 5 % of the step", ("mesh", *RUNNER_UP_HEADERS), rows[1])
    stages = Table("stages", "Stages, with bytes by holder", headers, rows[0])
    return rendered_html(
        "page.html",
        "remat.cluster",
        plan=plan,
        verdict=_verdict(plan),
        details=_details(plan),
        sections=drawn,
        tables=[stages, *([near] if plan.runners_up else [])],
        style=file_text("page.css"),
    )


def _verdict(plan: ClusterFile) -> str:
    said, most = plan.predicted, max(stage.overhead for stage in plan.stages)
    again = f", at most {percent_text(most)} of it recomputation" if most > 0 else ""
    return (
        f"Predicted to fit {plan.gpus} {plan.device}, {bytes_text(plan.budget_bytes)} each. "
        f"{seconds_text(said.step_us)} a step{again}, with {percent_text(said.mfu)} of the GPUs' "
        "peak flops. Modelled, not run."
    )


def _details(plan: ClusterFile) -> Iterator[tuple[str, str]]:
    said = plan.predicted
    yield "model", f"{plan.model}, {parameters_text(plan)}"
    yield "batch", f"{plan.batch} x {plan.seq} tokens a step"
    yield "step", f"{seconds_text(said.without_overlap_us)} if nothing ran beside a collective"
    yield "waits", f"{percent_text(said.bubble)} of the ranks' time in the pipeline"
    yield "mesh", mesh_text(plan.parallelism, plan.virtual_stages)
    yield "states", states_text(plan)
