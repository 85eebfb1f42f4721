"""How an optimizer exchanges the buckets of a model: synchronously, through windows, in pairs, during backward."""
