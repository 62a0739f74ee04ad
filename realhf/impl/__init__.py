"""The agents and environments that ship with the façade."""
