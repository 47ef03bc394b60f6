"""Schedules for Inductor: its graphs, its costs, the peak of its code."""
