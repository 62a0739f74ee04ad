"""Runs episodes: how many at once, on which worker, by which runner, and which of them are fresh enough to train on."""
