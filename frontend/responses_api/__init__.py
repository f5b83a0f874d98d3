"""/v1/responses: OpenAI's newer API over the path of chats."""
