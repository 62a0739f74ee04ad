"""The contracts that packages share: protocols, messages between processes, errors."""
