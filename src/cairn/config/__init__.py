"""Configuration: every option, where its value comes from, and where files are kept."""
