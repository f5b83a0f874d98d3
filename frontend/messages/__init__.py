"""POST /v1/messages: Anthropic's API over the path of chats."""
