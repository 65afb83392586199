"""What a person runs: sweeps, comparisons, their files and figures."""
