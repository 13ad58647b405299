"""LoRA adapters as files: PEFT folders and GGUF adapters, and merging one into its base."""
