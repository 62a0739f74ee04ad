"""Runs that were never made: the real admission and staleness code on a virtual clock."""
