"""Run and train any model that transformers knows: slower than this package's own decoder, and able to see pictures."""
