"""Schedules and the simulator that judges them; no torch, no solver."""
