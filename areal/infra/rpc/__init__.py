"""Calls between the processes of a run: connections, messages as bytes, and how processes find each other."""
