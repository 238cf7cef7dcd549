"""Explanations, fixes of refusals, and pictures, made when somebody asks."""
