"""The conversation in the terminal: reading questions, showing answers, commands, and chats that are kept."""
