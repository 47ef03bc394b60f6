"""torch.compile under a budget: `python -m benchmarks.compiled --out results.json`.

Trains the example GPT with dropout and the example ResNet with backend "remat" at falling
shares of the peak that torch.compile gives them, and prints budget, predicted and measured
peak, time and gradient error; beside them torch's own activation_memory_budget, each of its
steps in turn with ours at the peak that was measured of it.
Errors and times are against the compiled step that keeps everything; without dropout, errors
are against eager in float64. Each row has a process of its own.
Ends with status 1 if a measured peak exceeds its budget, a prediction is off by more than
0.5 %, a peak rises as the budget falls, or gradients are further off than they
may be, or the step is slower than torch's own at the peak measured of that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PERCENTS = (80, 60, 45, 30)
SHARES = (0.5, 0.3, 0.15)
SIZES = {
    "gpt": {"GPT_WIDTH": "128", "GPT_HEADS": "4", "GPT_SEQ": "128", "GPT_BATCH": "8"},
    "resnet": {"RESNET_BATCH": "256"},
}
CHANNELS_LAST = ("resnet",)
"""Examples laid out as convolutions on a CPU want them: else their backward takes copies."""
WITHOUT_DROPOUT = ("resnet",)
"""Examples whose gradients can be compared with eager's in float64."""
STEPS = 9
LIMIT_S = 600.0
TOLERANCE, NOISE = 1e-5, 2.0
"""Of gradients: where there is dropout, against the step that keeps everything; else, how many
times further from the truth than that step they may be. Kernels that fuse differently round
differently, and batch norm makes that larger."""
SLOWER = 0.02
"""How much slower than torch's step at the same peak counts as slower: two processes that run
the same compiled step differ by as much."""


def row(example: str, kind: str, amount: float) -> dict[str, Any]:
    """What a process of its own measured."""
    command = [sys.executable, "-m", "benchmarks.compiled_row", example, kind, str(amount)]
    environment = {**SIZES[example], **os.environ}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
            timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LIMIT_S:.0f} s"}
    if done.returncode:
        last = done.stderr.strip().splitlines() or ["no message"]
        return {"error": next((s for s in reversed(last) if "Error" in s), last[-1])}
    return json.loads(done.stdout.splitlines()[-1])


def complaints(example: str, found: list[dict[str, Any]]) -> list[str]:
    """What is not as it should be in the rows of ours, largest budget first."""
    said: list[str] = []
    rows = sorted((r for r in found if "error" not in r), key=lambda r: -r["budget_bytes"])
    for r in rows:
        if r["peak_bytes"] > r["budget_bytes"]:
            said.append(f"{example}: {r['peak_bytes']} measured above {r['budget_bytes']}")
        if abs(r["predicted_bytes"] / r["peak_bytes"] - 1) > 0.005:
            said.append(f"{example}: predicted {r['predicted_bytes']}, measured {r['peak_bytes']}")
        noise = NOISE * r["kept_error"] if "kept_error" in r else TOLERANCE
        if r.get("true_error", r["gradient_error"]) > noise:
            said.append(f"{example}: gradients off by {r['gradient_error']}")
    shares = [r for r in rows if "percent" in r]
    if any(less["peak_bytes"] > more["peak_bytes"] for more, less in pairwise(shares)):
        said.append(f"{example}: the measured peak rises as the budget falls")
    said += [
        f"{example}: {100 * r['over_stock']:.1f} % slower than stock at its peak"
        for r in rows
        if r.get("over_stock", 0.0) > SLOWER
    ]
    return said + [f"{example}: {r['error']}" for r in found if "error" in r]


def shown(example: str, name: str, found: dict[str, Any]) -> str:
    """One line of the table; peaks in MB of 10⁶ bytes."""
    head = f"{example:7}{name:11}"
    if "error" in found:
        return head + found["error"][:90]
    peaks = [found.get("budget_bytes"), found.get("predicted_bytes"), found["peak_bytes"]]
    slower = 100 * (found["step_s"] / found["kept_step_s"] - 1)
    off = found.get("true_error", found["gradient_error"])
    return (
        head
        + "".join(f"{peak / 1e6:10.2f}" if peak else f"{'-':>10}" for peak in peaks)
        + f"{slower:9.1f} %{off:12.1e}"
        + (f"{100 * found['overhead']:9.1f} %{found['search_s']:8.0f}" if peaks[0] else "")
    )


def beside(example: str, share: float) -> dict[str, Any]:
    """Torch's step at one memory budget and ours at its peak; both are printed."""
    found = row(example, "beside", share)
    if "error" in found:
        print(shown(example, f"beside {share}", found), flush=True)
        return found
    stock = {
        "peak_bytes": found["stock_peak_bytes"], "gradient_error": found["stock_gradient_error"],
        "step_s": found["stock_step_s"], "kept_step_s": found["kept_step_s"],
    }  # fmt: skip
    print(shown(example, f"stock {share}", stock), flush=True)
    print(shown(example, "  ours", found), f"{100 * found['over_stock']:+8.1f} %", flush=True)
    return found


def measured(example: str, percents: list[int], shares: list[float]) -> Iterator[dict[str, Any]]:
    """All rows of one example, printed as they come; yielded after each, to be kept."""
    rows: dict[str, Any] = {"stock": row(example, "stock", 1.0), "ours": [], "beside": []}
    print(shown(example, "stock", rows["stock"]), flush=True)
    for percent in percents:
        rows["ours"].append({"percent": percent, **row(example, "ours", percent)})
        print(shown(example, f"ours {percent} %", rows["ours"][-1]), flush=True)
        yield rows
    for share in shares:
        rows["beside"].append({"share": share, **beside(example, share)})
        yield rows


def main() -> int:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.compiled", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("--examples", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--percents", nargs="+", type=int, default=list(PERCENTS))
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    asked = parser.parse_args()
    print(
        "example row            budget predicted  measured     time    gradients    model  search"
        " over stock"
    )
    sizes = {k: v for k, v in os.environ.items() if k.startswith(("GPT_", "RESNET_"))}
    kept: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "sizes": {**SIZES, **sizes}}
    kept["examples"] = {}
    failures: list[str] = []
    for example in asked.examples:
        for rows in measured(example, asked.percents, asked.shares):
            kept["examples"][example] = rows
            if asked.out:
                asked.out.write_text(json.dumps(kept, indent=1) + "\n")
        rows = kept["examples"][example]
        failures += complaints(example, rows["ours"]) + complaints(example, rows["beside"])
    print("\n".join(failures) or "all as promised")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
