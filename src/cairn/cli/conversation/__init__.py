"""The conversation in the terminal: reading questions, showing answers, commands, and saved chats."""
