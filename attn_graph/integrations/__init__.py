"""Other libraries' attention in this library's terms."""
