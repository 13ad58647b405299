"""Answers with sources: documents in collections, found by meaning and by words, and answers that cite them."""
