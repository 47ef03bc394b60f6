"""Devices: the table of those that are not here, and meters for those that are."""
