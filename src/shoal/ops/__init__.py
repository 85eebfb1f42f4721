"""The operations that users call; ``shoal`` exports them."""
