"""Settings as small dataclasses, one file per owner, and the loader that fills them. Imports no torch."""
