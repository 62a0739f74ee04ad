"""The `areal` command: `main` finds the verb, one file per verb does it, `exit` says how a program ends."""
