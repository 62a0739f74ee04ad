"""Tool calls read out of sampled text, one file per way that models write them."""
