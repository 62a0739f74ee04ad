"""The commands that start training."""
