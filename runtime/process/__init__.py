"""The life of a process: start-up, signals, logs, counts, what outlives it."""
