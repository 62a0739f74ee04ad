"""Assemble the parts a config names, and the loop: take a batch, step, publish weights, checkpoint, show."""
