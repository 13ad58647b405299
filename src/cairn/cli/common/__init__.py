"""What several command groups share: terminal output, common options, and sampling flags."""
