"""Train a model: packed batches, forward and backward passes, the optimizer."""
