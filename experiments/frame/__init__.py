"""The frame of an experiment: settings that bound themselves, tasks, and what is made of them.

An experiment is a setting (`fields`), a task for every run (`task`), which the runner reads or
computes (`runner`), and what is found in their results (`experiment`).
"""
