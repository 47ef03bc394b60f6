"""Schedules for tools that people have open already.

A ``.pt2`` file of the training step was tried and is not kept. `torch.export.export` takes the
forward and backward graphs, but netron refuses ops that it does not know, those of backward among
them.
"""
