"""What all dialects share: reading a request, generating, and saying the answer."""
