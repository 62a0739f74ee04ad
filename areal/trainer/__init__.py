"""Training runs: assemble the parts that a config names, then take a batch, update, publish the weights, record, save.

`trainers.py` is what a script constructs; `ppo.py` and `sft.py` are the two kinds of run, `run.py` what they share.
"""
