"""Run and train the model, and make the built-in one."""
