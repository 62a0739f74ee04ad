"""Any model that transformers knows, run and trained: slower than this package's own decoder, and able to see images."""
