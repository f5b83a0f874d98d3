"""The frontend process: OpenAI-style HTTP in, server-sent events out."""
