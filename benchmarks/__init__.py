"""Timings of ipslimit against what one would use otherwise: `python -m benchmarks --help`."""
