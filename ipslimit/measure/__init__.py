"""What is measured: errors against the limit, the fluctuation's constant, rates, trajectories."""
