"""What a topology costs and gives: what its weights preserve, how fast agents agree, how old what they hear is."""
