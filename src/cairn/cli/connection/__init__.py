"""The connection to a server: requests, streams of answers, and which certificates are trusted."""
