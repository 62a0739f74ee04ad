"""The agents and environments that come with this interface."""
