"""What the bundled demo model is trained on and made of: words, dialogues, tools, tokenizer, network."""
