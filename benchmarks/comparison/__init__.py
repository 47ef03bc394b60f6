"""Training steps as people make them fit today, and ours, measured on the same models.

`training` (one folder up) is the driver. A row of its table is one step by one method. `row` and
`batches` measure it in a process of its own (`own_process`), in turns (`turns`, `cores`), and
count calm rounds alone (`calm`). `models` has the models, `methods`, `sac_ilp` and `ours` the
methods, `document` and its parts make the page.
"""
