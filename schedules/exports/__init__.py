"""Schedules for tools that people have open already."""
