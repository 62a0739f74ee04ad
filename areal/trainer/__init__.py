"""Assemble the parts a config names, and the loop: take a batch, advantages, step, publish weights, checkpoint."""
