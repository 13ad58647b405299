"""What all dialects share: reading a request, generating, and formatting the answer."""
