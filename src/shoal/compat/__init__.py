"""Other libraries' names on Shoal: a module for each, to be imported in the place of theirs."""
