"""Audio in, text out: /v1/audio/transcriptions and /v1/audio/translations, as OpenAI and vLLM have them. routes.py begins."""
