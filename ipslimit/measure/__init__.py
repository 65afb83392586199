"""What is measured: errors and distances from the limit, the constant, rates, trajectories."""
