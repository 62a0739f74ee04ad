"""Helpers that have never heard of reinforcement learning."""

from areal.utils import logging, stats_tracker

__all__ = ["logging", "stats_tracker"]
