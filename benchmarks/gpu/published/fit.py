"""Shares of peaks, fitted to the published times of the cases that are marked so.

Few figures cannot tell many shares apart, so each is held near where `start.json` says it begins,
by least squares over the logarithms of both: no share leaves its start unless steps ask for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.gpu.published.steps import Case, Step, predicted_ms
from remat.graph_capture.costs.roofline import Roofline
from remat.graph_capture.devices.known_devices import (
    SHARES_FILE,
    Efficiency,
    device_table,
    modelled_device,
)

START_FILE = Path(__file__).with_name("start.json")
STEP_ERROR, SHARE_ERROR = 0.1, 0.1
"""Standard deviations, relative: of published steps, and of shares about their start."""
LEAST, MOST = 0.05, 1.0
_ROUNDS, _DIFFERENCE = 30, 1e-4
_DAMPING = 1e-3  # of the first step of Levenberg and Marquardt

Shares = dict[str, dict[str, dict[str, float]]]  # by generation, kind, and what is a share of


def start() -> Shares:
    """What is assumed before any step is seen."""
    return json.loads(START_FILE.read_text())["shares"]


def roofline_of(case: Case, shares: Shares) -> Roofline:
    """The model of the case's device with these shares."""
    device = modelled_device(case.device)
    of_kinds = {**shares["any"], **shares[device.generation]}
    known = {kind: Efficiency(one["rate"], one["bandwidth"]) for kind, one in of_kinds.items()}
    return Roofline(device, known, device_table().launch_us)


class _Fit:
    """Numbers to vary: one for each place that `start.json` names as `fitted`."""

    def __init__(self, known: Mapping[str, tuple[Case, Step]]) -> None:
        self._start = start()
        self._fitted = [one for one in known.values() if one[0].side == "fitted"]
        places = json.loads(START_FILE.read_text())["fitted"]
        self._places: list[tuple[str, str, str]] = [tuple(place) for place in places]
        self._at = np.log([self._start[g][kind][what] for g, kind, what in self._places])

    def shares(self, logs: np.ndarray) -> Shares:
        """With the varied ones in place."""
        shares: Shares = json.loads(json.dumps(self._start))
        for (generation, kind, what), log in zip(self._places, logs, strict=True):
            shares[generation][kind][what] = float(np.clip(np.exp(log), LEAST, MOST))
        return shares

    def _errors(self, logs: np.ndarray) -> np.ndarray:
        shares = self.shares(logs)
        steps = [
            np.log(predicted_ms(case, step, roofline_of(case, shares)) / case.published_ms)
            for case, step in self._fitted
        ]
        return np.concatenate([np.array(steps) / STEP_ERROR, (logs - self._at) / SHARE_ERROR])

    def solved(self) -> Shares:
        """Levenberg and Marquardt's method, always the same number of rounds."""
        logs, damping = self._at.copy(), _DAMPING
        errors, one = self._errors(logs), np.eye(len(self._at))
        for _ in range(_ROUNDS):
            moved = [self._errors(logs + _DIFFERENCE * row) - errors for row in one]
            slopes = np.array(moved).T / _DIFFERENCE
            step = np.linalg.solve(slopes.T @ slopes + damping * one, -slopes.T @ errors)
            found = self._errors(logs + step)
            if found @ found < errors @ errors:
                logs, errors, damping = logs + step, found, damping / 3
            else:
                damping *= 5
        return self.shares(logs)


def solved(known: Mapping[str, tuple[Case, Step]]) -> Shares:
    """Rounded, as they are kept."""
    return {
        generation: {
            kind: {what: round(share, 2) for what, share in one.items()}
            for kind, one in kinds.items()
        }
        for generation, kinds in _Fit(known).solved().items()
    }


def fit(known: Mapping[str, tuple[Case, Step]]) -> None:
    """Write the shares that devices of the table are modelled with."""
    found = (f'  "{name}": {{\n{_lines(kinds)}\n  }}' for name, kinds in solved(known).items())
    SHARES_FILE.write_text("{\n" + ",\n".join(found) + "\n}\n")


def _lines(kinds: dict[str, dict[str, float]]) -> str:
    return ",\n".join(f'    "{kind}": {json.dumps(one)}' for kind, one in kinds.items())
