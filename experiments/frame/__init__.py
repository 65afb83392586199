"""The frame of an experiment: settings that bound themselves, tasks, and what is made of them.

A setting's fields say what they may be (`fields`). An `Experiment` makes a `Task` of every run,
and the `runner` reads or computes it. A command hands the results on and writes what is found;
`plot` and `window` have pieces for that.
"""
