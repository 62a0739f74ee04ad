"""Pure maths: from rewards to advantages, from log-probs to a loss.

An update has stages, a file for each: advantage, correction and weights are computed once for a batch, without a
gradient; ratio, objective, kl and entropy in every pass, with one. What chooses among their variants is stages.py.
Everything is flat. Shapes: N tokens, C completions, E episodes.
"""
