"""Values as the Python that makes them, and as HTML for notebooks."""
