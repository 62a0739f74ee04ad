"""Predictions of runs: the real admission and staleness code on a virtual clock."""
