"""The formats of tool calls, a module for those that are alike; ../registry.py says which module has which parsers."""
