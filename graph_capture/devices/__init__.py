"""Devices: the table of those that are not here, meters for those that are."""
