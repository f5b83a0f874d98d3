"""The formats of tool calls, a module each; ../registry.py names them."""
