"""KV blocks: the only room that knows them. The planner sees cache.py: KVCache."""
