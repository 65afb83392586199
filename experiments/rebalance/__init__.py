"""A language model resumed from rescaled checkpoints, with and without SAGGS."""
