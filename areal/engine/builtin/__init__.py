"""Models this package makes itself, once each, with a seed of their own, kept in the user's cache."""
