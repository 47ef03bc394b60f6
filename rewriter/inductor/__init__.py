"""Schedules for Inductor: its graphs, its prices, the peak of its code."""
