"""The life of an operation inside one agent: matching, exchange with peers, fusion, completion."""
