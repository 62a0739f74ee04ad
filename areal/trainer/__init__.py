"""Training runs: assemble the parts that a config names, then take a batch, update, publish the weights, record, save.

`ppo.py` and `sft.py` are the two kinds of run; `run.py` is what they share.
"""
