"""What `areal check` is made of: reading an episode's source, playing episodes, and the report of both."""
