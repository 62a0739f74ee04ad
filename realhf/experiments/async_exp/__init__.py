"""Experiments whose episodes run while the model trains."""
