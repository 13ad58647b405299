"""The Ollama dialect: /api/chat, /api/generate, /api/embed, and its models."""
