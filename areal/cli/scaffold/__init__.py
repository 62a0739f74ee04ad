"""What `areal new` writes: templates, where they go, and how a package's `__init__.py` learns a new name."""
