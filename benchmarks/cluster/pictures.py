"""The picture of `docs/clusters.md`: `python -m benchmarks.cluster.pictures`.

A plan of GPT 175B for 64 modelled A100, with fewer microbatches than were published, so that the
bubbles can be seen. It is the same on any machine.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.cluster.jobs import MODELS, WHOLE_80GB
from remat.cluster.mesh import ClusterRequest, MeshSpec
from remat.cluster.pictures import bytes_picture, timeline_picture
from remat.cluster.planning import plan_cluster
from remat.cluster.replayed_plan import replay_of

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
INK = {"light": "#222222", "dark": "#dddddd"}


def main() -> None:
    """Write both files."""
    request = ClusterRequest(
        64, 16, 2048, "a100", 8, WHOLE_80GB, asked=MeshSpec(8, 1, 8, 1, 1), receive_ring=True
    )
    plan = plan_cluster(f"{MODELS}:gpt_175b", request, 0).file
    assert plan is not None
    replay = replay_of(plan)
    whole, below = timeline_picture(plan, replay), bytes_picture(plan, replay, most=2)
    elements, down = list[str](), 0
    for picture in (whole, below):
        body = "\n".join(picture.elements)
        elements.append(f'<g transform="translate(0 {down})">\n{body}\n</g>')
        down += picture.height
    whole.elements, whole.height, whole.says = elements, down, f"{whole.says}; {below.says}"
    for theme, ink in INK.items():
        (PICTURES / f"cluster-{theme}.svg").write_text(whole.file(ink))


if __name__ == "__main__":
    main()
