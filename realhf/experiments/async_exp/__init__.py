"""Experiments whose episodes run beside the training."""
