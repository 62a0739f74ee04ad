"""Run and train any model that transformers knows: slower than the package's own decoder, and with images."""
