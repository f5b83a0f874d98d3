"""KV pages that move: loads into the prefix cache, saves out of it, and leases to those who read it (docs/moved-kv.md)."""
