"""The older interface, for agents that were written for it: a thin façade over the executor of `areal`.

It imports `areal`, never the reverse. `docs/legacy.md` lists what replaces each name.
"""
