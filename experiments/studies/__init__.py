"""Every clause of the theorem as a study of its own: figure, table, JSON and one sentence."""
