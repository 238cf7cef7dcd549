"""Values as Python code and as HTML for notebooks."""
