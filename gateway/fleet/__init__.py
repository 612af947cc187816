"""The fleet: engines' handles, places for turns, watching, refreshing, pins and evidence of versions."""
