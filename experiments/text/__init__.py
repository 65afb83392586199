"""Real text for the experiments: where it comes from and how it is read."""
