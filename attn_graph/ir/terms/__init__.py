"""What a user adds to scores: terms as text, trained tables, and the promises of own classes."""
