"""Bringing compressed packets near the decoder: ahead by plan, within bounds."""
