"""Text processing alone: prompts to token ids and back, tokens in and tokens out, and several conversations in one request."""
