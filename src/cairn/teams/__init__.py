"""Teams: several agents, forks of one shared beginning, that speak in rounds."""
