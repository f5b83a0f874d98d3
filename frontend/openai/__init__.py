"""OpenAI's API: bodies read into what the mesh is asked, and answers in its form."""
