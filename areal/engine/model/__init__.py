"""A model: its architecture, the decoder that computes it, its weights on disk and between processes."""
