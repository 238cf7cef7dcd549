"""Attention over several devices: who has what, who sends what to whom, and how it runs."""
