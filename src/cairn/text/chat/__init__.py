"""From messages to a prompt: chat templates, and replay of the ids that were sampled."""
