"""Pure maths: from rewards to advantages, from log-probs to a loss. Shapes: N tokens, C completions."""
