"""Other actor frameworks doing the same work, in an environment and processes of their own."""
