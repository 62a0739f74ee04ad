"""Speed claims, each as a program: `python -m benchmarks.NAME --json` prints one JSON object on its last line."""
