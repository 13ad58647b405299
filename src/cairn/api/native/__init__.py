"""Cairn's own routes: agents, turns, teams, workflows, collections and live events."""
