"""How models write tool calls and reasoning: one small module per format, and the registry that names them."""
