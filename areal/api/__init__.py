"""The contracts that every room may import: protocols, messages between processes, errors."""
