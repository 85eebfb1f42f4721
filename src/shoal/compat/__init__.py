"""Other libraries' names on Shoal: a module for each library, which scripts import instead."""
