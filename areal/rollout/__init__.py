"""Keep enough episodes in flight: admit, open the session an agent talks through, run, time out, age, hand over."""
