"""The documents, and what generates the regions in them that come from the code."""
