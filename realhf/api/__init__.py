"""What an agent and an environment are, under the module names that older code imports."""
