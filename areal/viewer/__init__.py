"""Shows runs from their stores, in a browser: `areal view RUNS`.

Pages are rendered here (`run_pages.py`, `episode_pages.py`, `trajectory_page.py`), served by `app.py` or written as
files by `bundle.py`. Scripts in `static/` draw what cannot be HTML: charts, the table of episodes, coloured tokens.
Nothing is changed by looking, and what a model said is text wherever it appears.
"""
