"""Drafts: guesses of the next tokens, which a step checks together with the token before them."""
