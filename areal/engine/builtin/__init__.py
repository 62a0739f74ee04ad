"""Models that this package makes itself on first use and keeps in the user's cache."""
