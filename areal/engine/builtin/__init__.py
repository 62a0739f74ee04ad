"""Models this package makes itself: `builtin:tiny-math`. Made once, with a seed of their own, and kept in the user's cache."""
