"""What an agent and an environment are, under the names that older code imports them by."""
