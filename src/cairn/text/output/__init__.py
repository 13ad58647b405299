"""From tokens to events: stop strings, reasoning, and tool calls in each model's form."""
