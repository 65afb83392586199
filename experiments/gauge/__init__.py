"""How much training, in both models, depends on the gauge of the initial law."""
