"""The engines, which compute steps."""
