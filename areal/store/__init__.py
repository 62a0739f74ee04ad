"""The run store: one SQLite file per run (`RUN/run.db`), the truth about what was sampled, trained and rejected.

`schema.py` has the tables, `blobs.py` what is kept in compressed form, `writer.py` the one thread that writes while a
run goes on, `reader.py` what others read, also meanwhile, `checks.py` how they know that it is what was written;
`search.py` finds episodes by what `filters.py` makes of a line that people type, `export.py` writes them to files.
Nothing here loads torch.
"""
