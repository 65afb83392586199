"""What serves any torch model: two optimizers, a layer, and what watches and balances them."""
