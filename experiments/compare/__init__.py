"""One (L, H) laid on the limit, rule by rule: paths, errors, distances of measures, a film."""
