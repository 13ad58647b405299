"""The OpenAI dialect: chat, completions, responses, embeddings, files and vector stores."""
