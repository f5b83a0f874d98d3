"""The scheduler process: one data-parallel rank's requests and KV blocks. Runs without torch."""
