"""The frame of an experiment: settings that bound themselves, tasks, and what is made of them.

A setting's fields say what they may be (`fields`). An `Experiment` makes a `Task` of every run,
and the `runner`, the one loop, reads or computes it, on whatever engine. A `Command` has the
options that all share, and its `Outcome` is written and printed; `plot` and `window` have pieces
for that. Classes of a user's own files are found by `own`.
"""
