"""What a mask leaves of the scores, as tiles and counts."""
