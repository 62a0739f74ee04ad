"""The commands that start a training."""
