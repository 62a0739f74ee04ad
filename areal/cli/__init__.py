"""The `areal` command: `main` finds the verb, and one file or package per verb does it."""
